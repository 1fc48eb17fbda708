package kvtier

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// unfinished ends the name of a block's file that is being written (docs/format.md).
const unfinished = ".tmp"

// noteFolders keeps the directories of the sidecar's tiers: files that it reserves lie below them.
func (c *Client) noteFolders(stat *tierpb.StatForEngines) {
	var folders []string
	for _, tier := range stat.GetTiers() {
		if folder := string(tier.Directory); filepath.IsAbs(folder) {
			folders = append(folders, strings.TrimSuffix(folder, "/")+"/")
		}
	}
	c.folders.Store(&folders)
}

// checkReserved refuses files that are to be filled and cannot be blocks in the making: no answer, right or wrong, makes this
// process write anything else of its user's. What else a file must be is seen when it is opened.
func (c *Client) checkReserved(ctx context.Context, reservations []*tierpb.Reservation) error {
	refused := func() int {
		return slices.IndexFunc(reservations, func(r *tierpb.Reservation) bool {
			return r.Outcome == tierpb.Reservation_OUTCOME_RESERVED && !c.mayFill(string(r.Path))
		})
	}
	at := refused()
	if at >= 0 { // a sidecar that has started anew may have other directories
		stat, err := c.rpc.Stat(ctx, &tierpb.StatRequest{})
		if err != nil {
			return c.result(ctx, err)
		}
		c.noteFolders(stat)
		at = refused()
	}
	if at >= 0 {
		return fmt.Errorf("the sidecar reserved %q, which is no unfinished block below one of its directories", reservations[at].Path)
	}
	return nil
}

// mayFill compares with directories as the sidecar writes them, for it names files in the same way: with a ".." in one, too.
func (c *Client) mayFill(path string) bool {
	folders := c.folders.Load()
	return folders != nil && strings.HasSuffix(path, unfinished) && slices.ContainsFunc(*folders, func(folder string) bool {
		rest, below := strings.CutPrefix(path, folder)
		return below && filepath.IsLocal(rest) && filepath.Clean(rest) == rest
	})
}

package kvtier

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// namingSidecar reserves the file that a test tells it to.
type namingSidecar struct {
	tierpb.UnimplementedBlockStoreServer
	mu     sync.Mutex
	folder string
	path   string
}

func (s *namingSidecar) Stat(context.Context, *tierpb.StatRequest) (*tierpb.StatForEngines, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &tierpb.StatForEngines{Tiers: []*tierpb.TierFolder{{Directory: []byte("/other")}, {Directory: []byte(s.folder)}, {}}}, nil
}

func (s *namingSidecar) Put(stream tierpb.BlockStore_PutServer) error {
	for {
		r, err := stream.Recv()
		if err != nil {
			return nil
		}
		if r.GetReserve() == nil {
			continue
		}
		s.mu.Lock()
		answer := &tierpb.PutReserved{Reservations: []*tierpb.Reservation{
			{Outcome: tierpb.Reservation_OUTCOME_PRESENT}, {Outcome: tierpb.Reservation_OUTCOME_RESERVED, Path: []byte(s.path)},
		}}
		s.mu.Unlock()
		if err := stream.Send(&tierpb.PutResponse{Result: &tierpb.PutResponse_Reserved{Reserved: answer}}); err != nil {
			return err
		}
	}
}

func TestOnlyUnfinishedBlocksBelowATiersDirectoryAreFilled(t *testing.T) {
	dir := shortDir(t)
	listener, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	sidecar := &namingSidecar{folder: filepath.Join(dir, "tier")}
	server := serveAs(t, listener, sidecar)
	defer server.Stop()
	c, err := NewClient(filepath.Join(dir, "s"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if !comesUp(t, c) {
		t.Fatal("the sidecar does not answer")
	}
	fill := func(path string) error {
		sidecar.mu.Lock()
		sidecar.path = path
		sidecar.mu.Unlock()
		session, err := c.Put(&tierpb.PutOpen{}, 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		defer session.Close()
		_, err = session.Reserve(&tierpb.PutText{Blocks: []*tierpb.TextBlock{{}, {}}})
		return err
	}
	if err := fill(filepath.Join(dir, "tier", "v1", "ab", "key.tmp")); err != nil {
		t.Error(err)
	}
	for _, path := range []string{
		"", "key.tmp", filepath.Join(dir, "home", "key.tmp"), filepath.Join(dir, "tier", "authorized_keys"),
		dir + "/tier/../home/key.tmp", dir + "/tiers/key.tmp", filepath.Join(dir, "tier", "v1", "key.kvb"), dir + "/tier/.tmp/keys",
	} {
		if err := fill(path); err == nil {
			t.Errorf("%q would be filled", path)
		}
	}
	// A directory that is set with a ".." in it is named so, and what lies beside it is refused as ever.
	for _, folder := range []string{dir + "/home/../tier", dir + "/tier/"} {
		sidecar.mu.Lock()
		sidecar.folder = folder
		sidecar.mu.Unlock()
		if err := fill(strings.TrimSuffix(folder, "/") + "/v1/ab/key.tmp"); err != nil {
			t.Error(err)
		}
		for _, path := range []string{folder + "/../key.tmp", folder + "/v1/../../key.tmp", folder + "//key.tmp", folder + "/v1/../key.tmp"} {
			if err := fill(path); err == nil {
				t.Errorf("%q would be filled", path)
			}
		}
	}
	if !c.Up() {
		t.Error("a wrong name took the client down")
	}
	// A sidecar that was started anew within a moment, elsewhere.
	sidecar.mu.Lock()
	sidecar.folder = filepath.Join(dir, "elsewhere")
	sidecar.mu.Unlock()
	if err := fill(filepath.Join(dir, "elsewhere", "key.tmp")); err != nil {
		t.Error(err)
	}
	if err := fill(filepath.Join(dir, "tier", "key.tmp")); err == nil {
		t.Error("the directory of before still counts")
	}
}

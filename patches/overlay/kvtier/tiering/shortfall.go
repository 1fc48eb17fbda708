package tiering

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// The reasons as this package calls them; the protocol says what each means, docs/operations.md what to do about it. A new
// one is added there, here where it arises, and in the test that reaches them all.
const (
	unexplained   = tierpb.Shortfall_SHORTFALL_UNSPECIFIED // also: nothing is missing
	nothingStored = tierpb.Shortfall_SHORTFALL_NOTHING_STORED
	storedEnds    = tierpb.Shortfall_SHORTFALL_ENDS
	storedDiffers = tierpb.Shortfall_SHORTFALL_DIFFERS
	tooShort      = tierpb.Shortfall_SHORTFALL_TOO_SHORT
	gateSaysNo    = tierpb.Shortfall_SHORTFALL_GATE
	recomputeOnly = tierpb.Shortfall_SHORTFALL_RECOMPUTE
	sidecarAway   = tierpb.Shortfall_SHORTFALL_SIDECAR_AWAY
	sidecarLate   = tierpb.Shortfall_SHORTFALL_SIDECAR_LATE
	sidecarError  = tierpb.Shortfall_SHORTFALL_SIDECAR_ERROR
	noMemory      = tierpb.Shortfall_SHORTFALL_NO_MEMORY
	damaged       = tierpb.Shortfall_SHORTFALL_DAMAGED
	unreadable    = tierpb.Shortfall_SHORTFALL_UNREADABLE
	blocksGone    = tierpb.Shortfall_SHORTFALL_BLOCKS_GONE
	filesLate     = tierpb.Shortfall_SHORTFALL_FILES_LATE
	readHangs     = tierpb.Shortfall_SHORTFALL_HANGING
	noCells       = tierpb.Shortfall_SHORTFALL_NO_CELLS
	shifted       = tierpb.Shortfall_SHORTFALL_SHIFTED
	memoryGone    = tierpb.Shortfall_SHORTFALL_MEMORY_GONE
	notLookedUp   = tierpb.Shortfall_SHORTFALL_NOT_LOOKED_UP
	notText       = tierpb.Shortfall_SHORTFALL_NOT_TEXT
	restoreFailed = tierpb.Shortfall_SHORTFALL_FAILED
	windowMissing = tierpb.Shortfall_SHORTFALL_WINDOW_MISSING
	stateMissing  = tierpb.Shortfall_SHORTFALL_STATE_MISSING
	unchecked     = tierpb.Shortfall_SHORTFALL_UNCHECKED
)

// shortfall is why more of a prompt is computed than its last token. The zero value: nothing is missing, as far as is known.
type shortfall struct {
	reason tierpb.Shortfall
	at     int // position where what is stored ends or differs, or where what can be looked up ends
}

// callReason is why a call of the sidecar came to nothing; late is what it means that the time was over.
func callReason(err error, late tierpb.Shortfall) tierpb.Shortfall {
	code := status.Code(err)
	switch {
	case errors.Is(err, errMemory):
		return noMemory
	case errors.Is(err, context.DeadlineExceeded), code == codes.DeadlineExceeded:
		return late
	case errors.Is(err, context.Canceled), code == codes.Canceled:
		return notLookedUp // its client has gone
	case errors.Is(err, kvtier.ErrDown), code == codes.Unavailable:
		return sidecarAway
	}
	return sidecarError
}

// blockReason is why a block cannot be used.
func blockReason(err error) tierpb.Shortfall {
	switch {
	case errors.Is(err, errMemory):
		return noMemory
	case errors.Is(err, errLate):
		return filesLate
	case errors.Is(err, kvtier.ErrCorrupt):
		return damaged
	}
	return unreadable
}

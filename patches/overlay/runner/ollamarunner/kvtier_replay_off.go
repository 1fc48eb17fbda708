//go:build !kvtier_replay

package ollamarunner

import (
	"net/http"

	"github.com/ollama/ollama/model/input"
)

// Only the build tag kvtier_replay records what is computed.

func replayAttach(*Server) {}

func replayLate(ready chan struct{}) chan struct{} { return ready }

func replayBuilt(int, input.Batch, []*input.Input, []int32) {}

func replayBegin(*Server, int, []*Sequence) {}

func replayEnd(int) {}

func replaySlow() {}

func replayDiscard(*InputCacheSlot, int32) {}

func replayFork(_, _ *InputCacheSlot, _ int32) {}

func replayShift(*InputCacheSlot, int32) {}

func replayRestored(*InputCacheSlot, []*input.Input, int32, int32, int32) {}

func replayFinished(*Sequence) {}

func replayAnswer(http.ResponseWriter, *http.Request) bool { return false }

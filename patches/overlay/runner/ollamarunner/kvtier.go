package ollamarunner

import (
	"context"
	"net/http"
	"sync/atomic"

	"github.com/ollama/ollama/kvtier/tiering"
	"github.com/ollama/ollama/model/input"
)

// The functions that stock files call are in this file, in the order of a request's life; those that follow a batch are
// in kvtier_batches.go, and what replay… records is in kvtier_replay.go, in a build of its own. What they mean is in package
// tier; here the Go engine's words are put into its. Each is a no-op unless the tiering is on for the loaded model, and a
// panic in one turns the tiering off, not the runner.

// loadingTier is the tiering of the model being loaded, until tierAttach takes it.
var loadingTier atomic.Pointer[tierLoading]

type tierLoading struct {
	tier *tiering.Tiering
	host *tierHost
}

// tierConnect begins to look for the sidecar when the loading of weights begins: the model's memory is taken, and the server
// is about to be told of it.
func tierConnect(s *Server) {
	defer tiering.Guard("connect")
	tellMirrored(s.model.Backend())
	host := newTierHost(s)
	if t := tiering.Connect(host); t != nil {
		loadingTier.Store(&tierLoading{t, host})
	}
}

// tierAttach decides whether the loaded model can be tiered. Called when loading is complete, before the first request.
func tierAttach(s *Server) {
	defer tiering.Guard("attach")
	replayAttach(s)
	loading := loadingTier.Swap(nil)
	if loading == nil {
		return
	}
	cache, model, reason := tierModel(s, loading.tier)
	if reason != "" {
		loading.tier.Refuse(reason, model)
		return
	}
	loading.host.bind(s, cache)
	engineHost.Store(loading.host)
	loading.tier.Attach(cache.Rows(), model)
}

// tierPrefetch looks the prompt up and has what should be restored in memory before any lock is taken.
func tierPrefetch(ctx context.Context, s *Server, seq *Sequence) {
	t, host := tiering.Active(), engineHost.Load()
	if t == nil || host == nil || seq.embeddingOnly {
		return
	}
	defer tiering.Guard("prefetch")
	if p := tierPrompt(host, seq.inputs, seq.mmStore); len(p.Tokens) > 0 {
		t.Prefetch(ctx, seq.inputs[0], p, len(seq.inputs), func() (slot, rows int) { return tierInMemory(s, seq.inputs) })
	}
}

// tierInMemory returns the slot that holds most of the prompt's first tokens and could go on from there, and how many.
func tierInMemory(s *Server, inputs []*input.Input) (best, rows int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	most := int32(0)
	for i := range s.cache.slots {
		slot := &s.cache.slots[i]
		if slot.InUse && !s.cache.multiUserCache {
			continue
		}
		held := countCommonPrefix(slot.Inputs, inputs)
		from := min(held, int32(len(inputs))-1) // the last input is computed
		if states, ok := s.cache.cache.(tierResumes); ok {
			held = states.KVTierResume(slot.Id, from)
		} else if s.cache.cache != nil && !s.cache.cache.CanResume(slot.Id, from) {
			continue
		}
		if held > most {
			best, most = slot.Id, held
		}
	}
	return best, int(most)
}

// tierBeforeDiscard saves what the slot is about to lose: everything from numPast on.
func tierBeforeDiscard(slot *InputCacheSlot, numPast int32) {
	replayDiscard(slot, numPast)
	if t := tiering.Active(); t != nil {
		defer tiering.Guard("discard")
		if engineHost.Load().noteStale(numPast) {
			numPast = 0
		}
		t.BeforeDiscard(slot.Id, int(numPast))
	}
}

// tierRestore copies prefetched rows into the slot's cache and returns the position to resume from.
func tierRestore(slot *InputCacheSlot, prompt []*input.Input, numPast int32, cachePrompt bool) int32 {
	t := tiering.Active()
	if t == nil {
		return numPast
	}
	var request any // identified by its first input
	if cachePrompt && len(prompt) > 0 {
		request = prompt[0]
	}
	host := engineHost.Load()
	if host != nil && host.stale {
		numPast = int32(t.StartOver(slot.Id))
	}
	resume := int32(t.Restore(slot.Id, request, int(numPast), len(prompt)))
	if host != nil && host.positions.strange {
		t.Doubt(slot.Id, int(resume)) // also of a prompt with images: one that was cut has others than its own
	}
	if first, cut := tierCut(prompt, int(resume)); cut {
		t.Doubt(slot.Id, first)
	}
	replayRestored(slot, prompt, int32(t.Kept(slot.Id)), numPast, resume)
	return resume
}

// tierBeforeFork saves what dst is about to lose, and lets dst inherit from src.
func tierBeforeFork(src, dst *InputCacheSlot, rows int32) {
	replayFork(src, dst, rows)
	if t := tiering.Active(); t != nil {
		defer tiering.Guard("fork")
		t.BeforeFork(src.Id, dst.Id, int(rows))
	}
}

// tierBeforeShift saves what is still exact; after the shift only the slot's first numKeep positions are. Stock rotates all
// cells between the first and the last of the shifted rows, those of others by an angle of 0: where that does not leave
// their bits alone nothing is exact any more, in no slot.
func tierBeforeShift(slot *InputCacheSlot, numKeep int32) {
	replayShift(slot, numKeep)
	t, host := tiering.Active(), engineHost.Load()
	if t == nil || host == nil {
		return
	}
	defer tiering.Guard("shift")
	if host.exactShift {
		t.BeforeShift(slot.Id, tierHeld(host, slot), int(numKeep))
		return
	}
	slots := host.server.cache.slots
	for i := range slots {
		t.BeforeShift(slots[i].Id, tierHeld(host, &slots[i]), 0)
	}
}

// tierHeld is what a slot holds. nil: it has images, of a request that is over; that one's end has said what it holds.
func tierHeld(h *tierHost, slot *InputCacheSlot) *tiering.Prompt {
	for _, seq := range h.server.seqs {
		if seq != nil && seq.cache == slot {
			p := tierPrompt(h, slot.Inputs, seq.mmStore)
			return &p
		}
	}
	if p := tierPrompt(h, slot.Inputs, nil); len(p.Tokens) == len(slot.Inputs) {
		return &p
	}
	return nil
}

// tierFinished queues the snapshot of a sequence that has ended.
func tierFinished(seq *Sequence) {
	replayFinished(seq)
	t, host := tiering.Active(), engineHost.Load()
	if t == nil || host == nil || seq.cache == nil || seq.embeddingOnly {
		return
	}
	defer tiering.Guard("finished")
	t.Finished(seq.cache.Id, tierPrompt(host, seq.cache.Inputs, seq.mmStore), seq.processingDuration)
}

// tierFlush answers when what the slots hold has been stored. The server calls it before it ends the runner.
func tierFlush(w http.ResponseWriter, r *http.Request) {
	if replayAnswer(w, r) {
		return
	}
	if t := tiering.Active(); t != nil {
		defer tiering.Guard("flush")
		t.Flush(r.Context())
	}
	w.WriteHeader(http.StatusNoContent)
}

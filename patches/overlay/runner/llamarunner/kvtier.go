package llamarunner

import (
	"context"
	"net/http"
	"sync/atomic"

	"github.com/ollama/ollama/kvtier/tiering"
)

// The functions that stock files call, in the order of a request's life. What they mean is in package tier; here the
// llama.cpp runner's words are put into its. Each is a no-op unless the tiering is on for the loaded model, and a panic in
// one turns the tiering off, not the runner.
//
// This runner never runs ahead: it holds Server.mu from building a batch until llama_decode has returned, so that nobody
// sees a cell whose row is not on its way.

// loadingTier is the tiering of the model being loaded, until tierAttach takes it.
var loadingTier atomic.Pointer[tierLoading]

type tierLoading struct {
	tier *tiering.Tiering
	host *tierHost
}

// activeHost is the Host of the loaded model, once there is a tiering.
var activeHost atomic.Pointer[tierHost]

// tierActive returns the tiering, nil where it is off. The caller holds the lock, and stock may have changed the cells.
func tierActive() (*tiering.Tiering, *tierHost) {
	t, host := tiering.Active(), activeHost.Load()
	if t == nil || host == nil {
		return nil, nil
	}
	host.rows.changed()
	return t, host
}

// tierConnect begins to look for the sidecar when the loading of weights begins.
func tierConnect(s *Server) {
	defer tiering.Guard("connect")
	host := &tierHost{server: s}
	if t := tiering.Connect(host); t != nil {
		loadingTier.Store(&tierLoading{t, host})
	}
}

// tierAttach decides whether the loaded model can be tiered. Called when loading is complete, before the first request.
func tierAttach(s *Server, adapters []string, multiUserCache bool) {
	defer tiering.Guard("attach")
	loading := loadingTier.Swap(nil)
	if loading == nil {
		return
	}
	rows, model, reason := tierModel(s, adapters, multiUserCache, loading.tier)
	if reason != "" {
		loading.tier.Refuse(reason, model)
		return
	}
	loading.host.rows = rows
	activeHost.Store(loading.host)
	loading.tier.Attach(rows, model)
}

// tierPrefetch looks the prompt up and has what should be restored in memory before any lock is taken. Of a prompt with
// images that is what comes before the first.
func tierPrefetch(ctx context.Context, s *Server, seq *Sequence) {
	t := tiering.Active()
	if t == nil || seq.embeddingOnly {
		return
	}
	defer tiering.Guard("prefetch")
	if tokens := tierTokens(seq.inputs); len(tokens) > 0 {
		t.Prefetch(ctx, &seq.inputs[0], tiering.Text(tokens), len(seq.inputs), func() (slot, rows int) { return tierInMemory(s, seq.inputs) })
	}
}

// tierTokens are the tokens of inputs, up to the first that is no token.
func tierTokens(inputs []input) []int32 {
	tokens := make([]int32, 0, len(inputs))
	for _, in := range inputs {
		if in.embed != nil {
			break
		}
		tokens = append(tokens, int32(in.token))
	}
	return tokens
}

// tierInMemory returns the slot that holds most of the prompt's first tokens, and how many.
func tierInMemory(s *Server, inputs []input) (best, rows int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, host := tierActive()
	for i := range s.cache.slots {
		slot := &s.cache.slots[i]
		if slot.InUse {
			continue
		}
		common := countCommonPrefix(slot.Inputs, inputs)
		if common > rows && (host == nil || !host.rows.lost(slot.Id, common)) {
			best, rows = slot.Id, common
		}
	}
	return best, rows
}

// tierBeforeDiscard saves what the slot is about to lose: everything from numPast on.
func tierBeforeDiscard(slot *InputCacheSlot, numPast int) {
	if t, _ := tierActive(); t != nil {
		defer tiering.Guard("discard")
		t.BeforeDiscard(slot.Id, numPast)
	}
}

// tierRestore copies prefetched rows into the slot's cache and returns the position to resume from. That is 0 where a shift
// has cost rows that the prompt begins with: stock would go on without them.
func tierRestore(slot *InputCacheSlot, prompt []input, numPast int, cachePrompt bool) (resume int) {
	t, host := tierActive()
	if t == nil {
		return numPast
	}
	resume = numPast
	defer tiering.Guard("restore")
	if numPast == 0 { // stock has emptied the slot
		delete(host.rows.shifted, slot.Id)
	}
	if host.rows.lost(slot.Id, numPast) {
		t.BeforeDiscard(slot.Id, 0)
		host.rows.Drop(slot.Id, 0)
		numPast, resume = 0, 0
	}
	var request any // identified by its first input
	if cachePrompt && len(prompt) > 0 {
		request = &prompt[0]
	}
	return t.Restore(slot.Id, request, numPast, len(prompt))
}

// tierBeforeShift saves what is still exact; after the shift only the slot's first numKeep positions are. Where a shift
// does not leave other rows' bits alone nothing is, in no slot.
func tierBeforeShift(c *InputCache, slot *InputCacheSlot, numKeep int) {
	t, host := tierActive()
	if t == nil {
		return
	}
	defer tiering.Guard("shift")
	host.rows.shifted[slot.Id] = true
	if host.rows.exactShift {
		held := tiering.Text(tierTokens(slot.Inputs))
		t.BeforeShift(slot.Id, &held, numKeep)
		return
	}
	for i := range c.slots {
		held := tiering.Text(tierTokens(c.slots[i].Inputs))
		t.BeforeShift(c.slots[i].Id, &held, 0)
	}
}

// tierDecoded queues snapshots of long prompts while they are computed. Called when a batch has been decoded, before stock
// takes its inputs as those of the slots.
func tierDecoded(s *Server) {
	t, _ := tierActive()
	if t == nil {
		return
	}
	defer tiering.Guard("decoded")
	batch := 0
	for _, seq := range s.seqs {
		if seq != nil {
			batch += len(seq.pendingInputs)
		}
	}
	for _, seq := range s.seqs {
		if seq == nil || seq.cache == nil || seq.embeddingOnly || len(seq.pendingInputs) == 0 {
			continue
		}
		held := len(seq.cache.Inputs) + len(seq.pendingInputs)
		worth := t.Launched(seq.cache.Id, held, batch)
		if worth == 0 {
			continue
		}
		tokens := tierTokens(seq.cache.Inputs)
		if len(tokens) == len(seq.cache.Inputs) {
			tokens = append(tokens, tierTokens(seq.pendingInputs)...)
		}
		if len(tokens) >= worth { // else there is an image before
			t.Progress(seq.cache.Id, tiering.Text(tokens[:worth]), nil)
		}
	}
}

// tierFinished queues the snapshot of a sequence that has ended.
func tierFinished(seq *Sequence) {
	t, _ := tierActive()
	if t == nil || seq.cache == nil || seq.embeddingOnly {
		return
	}
	defer tiering.Guard("finished")
	t.Finished(seq.cache.Id, tiering.Text(tierTokens(seq.cache.Inputs)), seq.processingDuration)
}

// tierFlush answers when what the slots hold has been stored. The server calls it before it ends the runner.
func (s *Server) tierFlush(w http.ResponseWriter, r *http.Request) {
	if t := tiering.Active(); t != nil {
		defer tiering.Guard("flush")
		s.mu.Lock()   // a request whose answer has been sent is finished when the lock is free
		s.mu.Unlock() //nolint:staticcheck
		t.Flush(r.Context())
	}
	w.WriteHeader(http.StatusNoContent)
}

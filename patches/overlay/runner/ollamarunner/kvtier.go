package ollamarunner

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ollama/ollama/kvcache"
	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
	"github.com/ollama/ollama/ml"
	"github.com/ollama/ollama/ml/nn/pooling"
	"github.com/ollama/ollama/model"
	"github.com/ollama/ollama/model/input"
	"github.com/ollama/ollama/version"
)

// The functions that stock files call are in this file, in the order of a request's life; those that follow a batch are
// in kvtier_batches.go, and what replay… records is in kvtier_replay.go, in a build of its own. Each is a no-op unless the
// tiering is on for the loaded model, and a panic in one turns the tiering off, not the runner.
//
// Locks, outermost first: Server.mu, then the scheduler's (inside KVTierSync), then tierBatches.mu. K/V is read and
// written, and every field of kvTier below "guarded by Server.mu" is used, only while Server.mu is held. No call to the
// sidecar and no file access happens under it.

// kvTier is the tiering of the one model that a runner process holds.
type kvTier struct {
	config      kvtier.Config
	attached    chan struct{} // closed when the model is loaded and what follows is set
	unsupported string        // why the model can't be tiered
	client      *kvtier.Client
	up          func() bool // is there a sidecar to store to?
	server      *Server
	cache       *kvcache.Causal
	layers      []kvtier.Layer
	dtype       string
	namespace   kvtier.Namespace
	description *tierpb.Namespace
	onHost      bool
	sync        func() // waits for everything that was launched on the devices

	batches tierBatches
	stats   tierStats
	memory  tierMemory
	reports atomic.Int32 // reports of damage on their way
	late    atomic.Int32 // fetches whose reads still hang although nobody waits for them any more
	staging []byte       // what is copied out of the cells at once; the snapshot loop's
	refusal string       // why the sidecar stores nothing of this model, as it was last said; the snapshot loop's

	// guarded by Server.mu
	slots   []tierSlot
	fetches map[*input.Input]*tierFetch // by the first input of the prompt they were made for

	layouts sync.Map // rows of a block -> *kvtier.Layout
	work    *tierQueue
}

var activeTier atomic.Pointer[kvTier]

// tierGuard turns a panic of the tiering into "tiering is off". Deferred by every hook.
func tierGuard(hook string) {
	if r := recover(); r != nil {
		activeTier.Store(nil)
		slog.Error("kv tiering failed and is now off for this model", "hook", hook, "panic", r)
	}
}

// batchesTier is the tiering whose batches are followed. It is never cleared, not even when the tiering fails: who waits
// for a batch must hear of its end.
var batchesTier atomic.Pointer[kvTier]

// loadingTier is the tiering of the model being loaded, until tierAttach takes it.
var loadingTier atomic.Pointer[kvTier]

// tierConnect begins to look for the sidecar when the loading of weights begins, so that the first request, which often
// follows the end of it at once, finds it.
func tierConnect(s *Server) {
	defer tierGuard("connect")
	config, ok := kvtier.FromEnv()
	if !ok {
		return
	}
	t := &kvTier{
		config: config, server: s, attached: make(chan struct{}),
		fetches: make(map[*input.Input]*tierFetch), work: newTierQueue(),
	}
	t.batches.init()
	client, err := kvtier.NewClient(config.Socket, t.onSidecarUp)
	if err != nil {
		slog.Warn("kv tiering is off", "error", err)
		return
	}
	t.client, t.up = client, client.Up
	loadingTier.Store(t)
}

// tierAttach decides whether the loaded model can be tiered. Called when loading is complete, before the first request.
func tierAttach(s *Server) {
	defer tierGuard("attach")
	replayAttach(s)
	t := loadingTier.Swap(nil)
	if t == nil {
		return
	}
	t.unsupported = t.bind(s)
	if t.unsupported != "" {
		slog.Warn("kv tiering is off for this model, it runs as in stock Ollama", "reason", t.unsupported)
	} else {
		slog.Info("kv tiering is on for this model", "layers", len(t.layers), "block_tokens", kvtier.BlockTokens,
			"namespace", fmt.Sprintf("%x", t.namespace[:8]), "gate", t.config.Gate, "socket", t.config.Socket)
		if t.config.Encoding != "" {
			slog.Warn("kv tiering stores rows rounded, answers after a restore may differ", "encoding", t.config.Encoding)
		}
		batchesTier.Store(t)
		activeTier.Store(t)
		go t.snapshotLoop()
	}
	close(t.attached)
	t.client.WaitFirst()
}

// bind fills in what the model says; it returns why the model can't be tiered.
func (t *kvTier) bind(s *Server) string {
	if s.cache == nil || s.cache.cache == nil {
		return "the model has no K/V cache"
	}
	if pooling.Type(s.model.Backend().Config().Uint("pooling_type")) != pooling.TypeNone {
		return "embedding model"
	}
	cache, ok := s.cache.cache.(*kvcache.Causal)
	if _, wrapper := s.cache.cache.(*kvcache.WrapperCache); wrapper {
		return "several caches in one (sliding window attention or an encoder), not supported yet"
	} else if !ok {
		return fmt.Sprintf("cache of type %T, not supported yet", s.cache.cache)
	}
	if reason := cache.KVTierUnsupported(); reason != "" {
		return reason + ", not supported yet"
	}
	if _, ok := s.model.(model.MultimodalProcessor); ok {
		return "model with image input, not supported yet"
	}
	backend, ok := s.model.Backend().(tierBackend)
	if !ok {
		return "backend without synchronisation"
	}
	build, err := kvtier.Build(ml.LibOllamaPath)
	if err != nil {
		return "what this program was built from can't be told: " + err.Error()
	}
	t.cache, t.onHost, t.sync = cache, cache.KVTierOnHost(), backend.KVTierSync
	t.dtype = "f16"
	for _, l := range cache.KVTierLayers() {
		t.layers = append(t.layers, kvtier.Layer{
			Layer: l.Layer, Kind: "full", KVHeads: l.KVHeads, KHeadDim: l.KHeadDim, VHeadDim: l.VHeadDim,
			KRowBytes: l.KRowBytes, VRowBytes: l.VRowBytes,
		})
	}
	t.description = kvtier.Description{
		Model:          filepath.Base(s.modelPath),
		Engine:         kvtier.EngineName(version.Version, build),
		CacheDType:     t.dtype,
		Layers:         t.layers,
		FlashAttention: s.lastLoad.FlashAttention == ml.FlashAttentionEnabled,
		Extra: tierComputing(backend, cache.KVTierPlacement(), t.layers, s.lastLoad.GPULayers) +
			kvtier.AttentionExtra(tierAttention(s), s.batchSize) + t.config.NamespaceExtra(),
	}.Proto()
	t.namespace = kvtier.NamespaceOf(t.description)
	t.slots = make([]tierSlot, len(s.cache.slots))
	for i := range t.slots {
		t.slots[i] = newTierSlot(i)
	}
	t.stats.init(t)
	return ""
}

// tierAttention says how attention is computed on the CPU; "" for a model that has no layer there. It starts with
// kvtier.AttentionExact where our kernels do it.
func tierAttention(s *Server) string {
	if s.model == nil || s.lastLoad.GPULayers.Sum() >= int(s.model.Backend().Config().Uint("block_count")) {
		return ""
	}
	backend, ok := s.model.Backend().(interface{ KVTierAttention() string })
	switch {
	case !ok:
		return ""
	case kvtier.CPUAttentionExact() && s.lastLoad.FlashAttention != ml.FlashAttentionEnabled:
		return "stock (flash attention is off)"
	}
	return backend.KVTierAttention()
}

func (t *kvTier) layout(rows int) *kvtier.Layout {
	if l, ok := t.layouts.Load(rows); ok {
		return l.(*kvtier.Layout)
	}
	l, _ := t.layouts.LoadOrStore(rows, kvtier.NewLayout(t.layers, rows))
	return l.(*kvtier.Layout)
}

// onSidecarUp reports the runner and stores what the slots hold and the sidecar may have missed.
func (t *kvTier) onSidecarUp() {
	<-t.attached
	if t.unsupported != "" {
		_ = t.client.Report(t.stats.unsupported(t.server, t.unsupported))
		return
	}
	t.stats.report(t)
	t.server.mu.Lock()
	defer t.server.mu.Unlock()
	for i := range t.slots {
		t.slots[i].lineage.saved = 0
		t.slots[i].lineage.refused = false
		t.work.add(t.slots[i].lineage)
	}
}

// tierPrefetch looks the prompt up and has what should be restored in memory before any lock is taken.
func tierPrefetch(ctx context.Context, s *Server, seq *Sequence) {
	t := activeTier.Load()
	if t == nil || seq.embeddingOnly {
		return
	}
	defer tierGuard("prefetch")
	if f := t.prefetch(ctx, seq.inputs); f != nil {
		s.mu.Lock()
		t.fetches[f.first] = f
		s.mu.Unlock()
		// The request's context ends with its handler, whichever way it returns.
		context.AfterFunc(ctx, func() {
			s.mu.Lock()
			delete(t.fetches, f.first)
			s.mu.Unlock()
			f.close()
		})
	}
}

// tierBeforeDiscard saves what the slot is about to lose: everything from numPast on.
func tierBeforeDiscard(slot *InputCacheSlot, numPast int32) {
	replayDiscard(slot, numPast)
	t := activeTier.Load()
	if t == nil {
		return
	}
	defer tierGuard("discard")
	t.slots[slot.Id].discard(t, numPast)
}

// tierRestore copies prefetched rows into the slot's cache and returns the position to resume from.
func tierRestore(slot *InputCacheSlot, prompt []*input.Input, numPast int32, cachePrompt bool) (resume int32) {
	t := activeTier.Load()
	if t == nil {
		return numPast
	}
	resume = numPast
	defer func() {
		if r := recover(); r != nil {
			activeTier.Store(nil)
			slog.Error("kv tiering failed and is now off for this model", "hook", "restore", "panic", r)
			_ = t.cache.Remove(slot.Id, numPast, math.MaxInt32)
			resume = numPast
		}
	}()
	if cachePrompt && len(prompt) > 0 {
		if f := t.fetches[prompt[0]]; f != nil {
			delete(t.fetches, prompt[0])
			resume = t.restore(f, slot, numPast)
			replayRestored(slot, prompt, numPast, resume)
			go f.close() // giving gigabytes back takes time, and nobody needs to wait for it
		}
	}
	t.slots[slot.Id].load(numPast, resume, int32(len(prompt)))
	t.slots[slot.Id].beside = t.batches.rows()
	return resume
}

// tierBeforeFork saves what dst is about to lose, and lets dst inherit from src.
func tierBeforeFork(src, dst *InputCacheSlot, rows int32) {
	replayFork(src, dst, rows)
	t := activeTier.Load()
	if t == nil {
		return
	}
	defer tierGuard("fork")
	t.slots[dst.Id].discard(t, 0)
	t.slots[dst.Id].fork(&t.slots[src.Id], rows)
}

// tierBeforeShift saves what is still exact; after the shift only the first numKeep positions are.
func tierBeforeShift(slot *InputCacheSlot, numKeep int32) {
	replayShift(slot, numKeep)
	t := activeTier.Load()
	if t == nil {
		return
	}
	defer tierGuard("shift")
	t.quiesce()
	ts := &t.slots[slot.Id]
	ts.note(slot.Inputs, nil)
	// Not numKeep: when the shift turns out not to be possible, stock empties the slot and computes all of it again, in
	// other cells.
	ts.discard(t, 0)
	ts.taint = min(ts.taint, numKeep)
}

// tierFinished queues the snapshot of a sequence that has ended.
func tierFinished(seq *Sequence) {
	replayFinished(seq)
	t := activeTier.Load()
	if t == nil || seq.cache == nil || seq.embeddingOnly {
		return
	}
	defer tierGuard("finished")
	ts := &t.slots[seq.cache.Id]
	ts.note(seq.cache.Inputs, t.batches.running())
	ts.lineage.finished = true
	t.work.add(ts.lineage)
	t.stats.request(ts, seq)
}

// tierFlush answers when what the slots hold has been stored. The server calls it before it ends the runner.
func tierFlush(w http.ResponseWriter, r *http.Request) {
	if replayAnswer(w, r) {
		return
	}
	if t := activeTier.Load(); t != nil {
		defer tierGuard("flush")
		stored := make(chan struct{})
		go func() {
			t.work.drain()
			t.stats.report(t)
			close(stored)
		}()
		select {
		case <-stored:
		case <-r.Context().Done():
			slog.Warn("kv tiering: model unloaded before its snapshot was complete")
		case <-time.After(10 * time.Second):
		}
	}
	w.WriteHeader(http.StatusNoContent)
}

// quiesce waits until no batch is being computed. The caller holds Server.mu, so none can start before it is released.
func (t *kvTier) quiesce() {
	t.batches.waitNoneRunning()
	t.sync()
}

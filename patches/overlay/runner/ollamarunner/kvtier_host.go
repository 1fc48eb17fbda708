package ollamarunner

import (
	"sync/atomic"
	"time"

	"github.com/ollama/ollama/kvcache"
)

// tierHost is the Go engine as package tier sees it: its lock, and what it has launched or built ahead. When it waits for the
// devices it takes the scheduler's lock (inside KVTierSync), and tierBatches.mu inside of that.
type tierHost struct {
	server     *Server
	cache      *kvcache.Causal
	exactShift bool   // a rotation by an angle of 0 leaves a row's bits as they are
	sync       func() // waits for everything that was launched on the devices
	batches    tierBatches
}

// engineHost is the host whose batches are followed. It is never cleared, not even when the tiering fails: who waits for a
// batch must hear of its end.
var engineHost atomic.Pointer[tierHost]

// tierSettleWait bounds the wait for the batches that are built when a restore is about to happen: with a long prompt of
// another request, one may take seconds.
const tierSettleWait = 500 * time.Millisecond

func newTierHost(s *Server) *tierHost {
	h := &tierHost{server: s}
	h.batches.init()
	return h
}

// bind takes what is known once the model is loaded; tierModel has nothing against it.
func (h *tierHost) bind(s *Server) {
	h.cache = s.cache.cache.(*kvcache.Causal)
	// Quantised rows are rounded anew; scaled RoPE multiplies by a factor whatever the angle.
	h.exactShift = h.cache.KVTierType() == "f16" && s.model.Backend().Config().String("rope.scaling.type") == ""
	h.sync = s.model.Backend().(tierBackend).KVTierSync
}

func (h *tierHost) Lock() { h.server.mu.Lock() }

func (h *tierHost) Unlock() { h.server.mu.Unlock() }

// Quiesce waits until no batch is being computed. The caller holds Server.mu, so none can start before it is released.
func (h *tierHost) Quiesce() {
	h.batches.waitNoneRunning()
	h.sync()
}

func (h *tierHost) Running() []int { return h.batches.running() }

func (h *tierHost) Wait(batches []int) { h.batches.wait(batches) }

func (h *tierHost) Ahead() int { return h.batches.rows() }

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
	cache      *kvcache.KVTierCache
	windows    []kvcache.KVTierWindow
	states     int    // the child of the states of recurrent layers; 0: there are none
	exactShift bool   // a rotation by an angle of 0 leaves a row's bits as they are
	sync       func() // waits for everything that was launched on the devices
	batches    tierBatches

	sharedPositions bool // a request with images changes the positions of the others (kvtier_images.go)
	positions       tierPositions

	order *tierOrder

	stale bool // the states that stock goes back to will be changed by a batch that was built before
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
func (h *tierHost) bind(s *Server, cache *kvcache.KVTierCache) {
	h.cache, h.windows = cache, cache.Windows()
	if states, child := cache.States(); states != nil {
		h.states = child
	}
	// Quantised rows are rounded anew; scaled RoPE may multiply by a factor whatever the angle: gpt-oss has a factor and
	// names no type.
	config := s.model.Backend().Config()
	scaled := config.String("rope.scaling.type") != "" || config.Float("rope.scaling.factor", 1) != 1
	h.exactShift = cache.Type() == "f16" && !scaled
	h.sharedPositions = tierSharesPositions(s.model)
	backend := s.model.Backend().(tierBackend)
	h.sync = backend.KVTierSync
	if tierExpectsOrder(s, backend, cache) {
		h.order = newTierOrder(backend, cache)
	}
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

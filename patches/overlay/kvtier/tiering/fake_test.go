package tiering

import (
	"slices"
	"sync"
	"testing"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tierpb"
)

const (
	fakeCells    = 1024
	fakeRowBytes = 16
)

// fakeHost is a runner that computes nothing. Batches are those that a test begins and ends.
type fakeHost struct {
	sync.Mutex
	quiesced int // how often
	awaited  int
	avoid    map[int32]struct{}
	ahead    int
	exported int    // blocks
	restores func() // when a restore is about to happen
	letGo    func() // when somebody has let go of the lock

	batches sync.Mutex
	ended   *sync.Cond
	started map[int]struct{}
}

func newFakeHost() *fakeHost {
	h := &fakeHost{started: make(map[int]struct{})}
	h.ended = sync.NewCond(&h.batches)
	return h
}

func (h *fakeHost) Unlock() {
	letGo := h.letGo
	h.Mutex.Unlock()
	if letGo != nil {
		letGo()
	}
}

func (h *fakeHost) begin(batch int) {
	h.batches.Lock()
	defer h.batches.Unlock()
	h.started[batch] = struct{}{}
}

func (h *fakeHost) end(batch int) {
	h.batches.Lock()
	defer h.batches.Unlock()
	delete(h.started, batch)
	h.ended.Broadcast()
}

func (h *fakeHost) Quiesce() {
	h.batches.Lock()
	defer h.batches.Unlock()
	for len(h.started) > 0 {
		h.ended.Wait()
	}
	h.quiesced++
}

func (h *fakeHost) BeforeRestore() {
	if h.restores != nil {
		h.restores()
	}
	h.Quiesce()
}

func (h *fakeHost) Running() (ids []int) {
	h.batches.Lock()
	defer h.batches.Unlock()
	for id := range h.started {
		ids = append(ids, id)
	}
	return ids
}

func (h *fakeHost) Wait(ids []int) {
	h.batches.Lock()
	defer h.batches.Unlock()
	for slices.ContainsFunc(ids, func(id int) bool { _, ok := h.started[id]; return ok }) {
		h.ended.Wait()
	}
}

func (h *fakeHost) AwaitBuilt() {
	h.Lock() // nobody who calls it holds the lock
	defer h.Unlock()
	h.awaited++
}

func (h *fakeHost) Ahead() int { return h.ahead }

func (h *fakeHost) Avoid() map[int32]struct{} { return h.avoid }

func (h *fakeHost) AvoidWindow(int) map[int32]struct{} { return nil }

// fakeRows are cells in plain memory; a free cell belongs to slot -1.
type fakeRows struct {
	slot, position [fakeCells]int
	planes         []rows.Plane
}

type fakeTensor []byte

func (t fakeTensor) KVTierHost() []byte               { return t }
func (t fakeTensor) KVTierGet(offset int, dst []byte) { copy(dst, t[offset:]) }
func (t fakeTensor) KVTierSet(offset int, src []byte) { copy(t[offset:], src) }

func newFakeRows(segments int) *fakeRows {
	r := &fakeRows{}
	for i := range r.slot {
		r.slot[i] = -1
	}
	for range segments {
		r.planes = append(r.planes, rows.Plane{
			Tensor: make(fakeTensor, fakeCells*fakeRowBytes), RowBytes: fakeRowBytes, Cells: fakeCells,
		})
	}
	return r
}

func (r *fakeRows) Cells(slot, from, to int) []int32 {
	cells := make([]int32, to-from)
	found := make([]bool, to-from)
	for i := range r.slot {
		if p := r.position[i]; r.slot[i] == slot && p >= from && p < to {
			if found[p-from] {
				return nil
			}
			cells[p-from], found[p-from] = int32(i), true
		}
	}
	if slices.Contains(found, false) {
		return nil
	}
	return cells
}

func (r *fakeRows) Find(_, _, n int, avoid map[int32]struct{}) (cells []int32) {
	for i := range r.slot {
		if _, ok := avoid[int32(i)]; r.slot[i] < 0 && !ok && len(cells) < n {
			cells = append(cells, int32(i))
		}
	}
	return cells
}

func (r *fakeRows) Read(segment int, cells []int32, dst []byte) { r.planes[segment].Read(cells, dst) }

func (r *fakeRows) Write(segment int, cells []int32, chunk rows.Chunk) {
	r.planes[segment].Write(cells, chunk)
}

func (r *fakeRows) Memory(segment int, cells []int32) [][]byte {
	return r.planes[segment].Memory(cells)
}

func (r *fakeRows) Occupy(slot, from int, cells []int32) {
	for i, cell := range cells {
		r.slot[cell], r.position[cell] = slot, from+i
	}
}

func (r *fakeRows) Drop(slot, from int) {
	for i := range r.slot {
		if r.slot[i] == slot && r.position[i] >= from {
			r.slot[i] = -1
		}
	}
}

// fake returns the tiering of a model of two layers and so many slots, without a sidecar, and without anybody who stores
// what is queued.
func fake(t *testing.T, slots int) *Tiering {
	t.Helper()
	host := newFakeHost()
	tier := &Tiering{
		config: kvtier.Config{MinTokens: 1, Snapshot: true, Gate: kvtier.GateRestore}, host: host,
		up: func() bool { return true }, work: newQueue(),
	}
	tier.memory.available = func() int { return 1 << 40 } // whatever else the machine does
	client, err := kvtier.NewClient(t.TempDir()+"/none.sock", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	tier.client = client
	model := Model{Slots: slots, DType: "f16", OnHost: true, Description: &tierpb.Namespace{}, Attention: func() string { return "" }}
	for i := range 2 {
		model.Layers = append(model.Layers, kvtier.Layer{
			Layer: i, Kind: "full", KVHeads: 2, KHeadDim: 4, VHeadDim: 4, KRowBytes: fakeRowBytes, VRowBytes: fakeRowBytes,
		})
	}
	tier.bind(newFakeRows(2*len(model.Layers)), model)
	tier.sound.Store(true)
	active.Store(tier)
	t.Cleanup(func() { active.Store(nil) })
	return tier
}

func (t *Tiering) fakeHost() *fakeHost { return t.host.(*fakeHost) }

func tokensFrom(from, to int) (tokens []int32) {
	for i := from; i < to; i++ {
		tokens = append(tokens, int32(i))
	}
	return tokens
}

// fillCells gives a slot so many rows in all segments that hold (position + salt) in every byte.
func (t *Tiering) fillCells(slot, n int, salt byte) {
	cells := t.rows.Find(slot, 0, n, nil)
	all := make([]byte, n*fakeRowBytes)
	for i := range all {
		all[i] = byte(i/fakeRowBytes) + salt
	}
	for segment := range 2 * len(t.model.Layers) {
		t.rows.Write(segment, cells, rows.Chunk{Data: all})
	}
	t.rows.Occupy(slot, 0, cells)
}

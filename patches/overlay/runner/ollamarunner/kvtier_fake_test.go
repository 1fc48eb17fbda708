package ollamarunner

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ollama/ollama/kvcache"
	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tiering"
	"github.com/ollama/ollama/ml"
	"github.com/ollama/ollama/model/input"
)

// A backend that only has memory: enough for a Causal cache whose rows are read and written, never computed.
type (
	tierFakeBackend struct{ ml.Backend }
	tierFakeContext struct{ ml.Context }
	tierFakeTensor  struct {
		ml.Tensor
		dims []int
		data []byte
	}
)

func (tierFakeBackend) NewContextSize(int) ml.Context { return tierFakeContext{} }

func (tierFakeContext) Layer(int) ml.Context { return tierFakeContext{} }

func (c tierFakeContext) Input() ml.Context { return c }

func (c tierFakeContext) Forward(...ml.Tensor) ml.Context { return c }

func (tierFakeContext) Close() {}

func (tierFakeContext) FromInts(s []int32, shape ...int) ml.Tensor { return tierFakeNew(len(s)) }

func (tierFakeContext) FromFloats(s []float32, shape ...int) ml.Tensor { return tierFakeNew(len(s)) }

func (tierFakeContext) Zeros(_ ml.DType, shape ...int) ml.Tensor { return tierFakeNew(shape...) }

func tierFakeNew(dims ...int) *tierFakeTensor {
	n := 2
	for _, d := range dims {
		n *= d
	}
	return &tierFakeTensor{dims: dims, data: make([]byte, n)}
}

func (t *tierFakeTensor) Dim(n int) int { return t.dims[n] }

func (t *tierFakeTensor) Stride(n int) int {
	s := 2
	for i := range n {
		s *= t.dims[i]
	}
	return s
}

func (t *tierFakeTensor) DType() ml.DType { return ml.DTypeF16 }

func (t *tierFakeTensor) Cast(ml.Context, ml.DType) ml.Tensor { return t }

func (t *tierFakeTensor) Reshape(ml.Context, ...int) ml.Tensor { return t }

func (t *tierFakeTensor) SetRows(ml.Context, ml.Tensor, ml.Tensor) ml.Tensor { return t }

func (t *tierFakeTensor) KVTierHost() []byte { return t.data }

func (t *tierFakeTensor) KVTierOnDevice() bool { return false }

func (t *tierFakeTensor) KVTierGet(offset int, dst []byte) { copy(dst, t.data[offset:]) }

func (t *tierFakeTensor) KVTierSet(offset int, src []byte) { copy(t.data[offset:], src) }

func (t *tierFakeTensor) KVTierCopiesColumns() bool { return true }

func (t *tierFakeTensor) KVTierGetColumns([]rows.Run, int, int, []byte) {
	panic("the CPU can access it")
}

func (t *tierFakeTensor) KVTierSetColumns([]rows.Run, int, int, []byte) {
	panic("the CPU can access it")
}

const (
	tierFakeCtx      = 1024
	tierFakeRowBytes = 2 * 4 * 2
)

// tierFake is a runner over two caches of a layer each, of a model that nobody computes, with its tiering.
type tierFake struct {
	*tierHost
	rows     *kvcache.KVTierRows
	segments int
	tier     *tiering.Tiering
}

// newTierFake turns the tiering on, with the sidecar on a socket, if there is one. The window of the one cache is as large as
// the context: no row is ever dropped.
func newTierFake(t *testing.T, slots int, socket string) tierFake {
	t.Helper()
	return newTierFakeOf(t, slots, tierFakeCtx, socket)
}

// newTierFakeOf is newTierFake with a window of that number of positions, and with more windows.
func newTierFakeOf(t *testing.T, slots int, window int32, socket string, more ...tiering.Window) tierFake {
	t.Helper()
	cache := kvcache.NewWrapperCache(kvcache.NewSWACache(window, nil), kvcache.NewCausalCache(nil))
	cache.Init(tierFakeBackend{}, ml.DTypeF16, slots, tierFakeCtx, 32)
	ctx := tierFakeContext{}
	if err := cache.StartForward(ctx, input.Batch{Positions: []int32{0}, Sequences: []int{0}}, true); err != nil {
		t.Fatal(err)
	}
	for layer := range 2 {
		cache.SetLayer(layer)
		cache.SetLayerType(layer)
		cache.Put(ctx, tierFakeNew(4, 2, 1), tierFakeNew(4, 2, 1))
	}
	tiered, reason := kvcache.KVTierCacheOf(cache)
	if reason != "" {
		t.Fatal(reason)
	}
	s := &Server{cache: &InputCache{numCtx: tierFakeCtx, enabled: true, slots: make([]InputCacheSlot, slots), cache: cache}}
	for i := range s.cache.slots {
		s.cache.slots[i].Id, s.cache.slots[i].InUse = i, true // what one holds is not found in memory for another
	}
	for name, value := range map[string]string{
		"OLLAMA_KV_TIERING": "1", "OLLAMA_KV_TIER_SOCKET": socket, "OLLAMA_KV_TIER_GATE": kvtier.GateRestore,
		"OLLAMA_KV_TIER_MIN_TOKENS": "1",
	} {
		t.Setenv(name, value)
	}
	host := newTierHost(s)
	host.cache, host.windows, host.sync, host.exactShift = tiered, tiered.Windows(), func() {}, true
	f := tierFake{tierHost: host, rows: tiered.Rows(), segments: 2 * len(tierKept(tiered)), tier: tiering.Connect(host)}
	layers := tierKept(tiered)
	engineHost.Store(host)
	f.tier.Attach(f.rows, tiering.Model{
		Files: []kvtier.LoadedFile{tierFakeFile(t)}, Slots: slots, Layers: layers, Windows: append(tierWindows(tiered, false), more...), DType: "f16", OnHost: true, Attention: func() string { return "" },
		Description: kvtier.Description{
			Model: "sha256-of-nothing", Engine: "test", CacheDType: "f16", Layers: layers, Extra: t.Name() + time.Now().String(),
		}.Proto(),
	})
	t.Cleanup(func() { // the next test's runner has none, as after any panic
		defer tiering.Guard("none")
		panic("the test is over")
	})
	return f
}

// tierFakeFile is a model's file, which the sidecar reads before it stores anything.
func tierFakeFile(t *testing.T) kvtier.LoadedFile {
	t.Helper()
	content := []byte(t.Name())
	path := filepath.Join(t.TempDir(), fmt.Sprintf("sha256-%x", sha256.Sum256(content)))
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := kvtier.LookAt(path)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// newTierFakeWithSidecar is newTierFake with the sidecar that KVTIER_TEST_SOCKET names, once it is known to answer. Slot 0
// is empty, and so is slot 1.
func newTierFakeWithSidecar(t *testing.T) tierFake {
	t.Helper()
	return newTierFakeWithSidecarOf(t, tierFakeCtx)
}

// newTierFakeWithSidecarOf is newTierFakeWithSidecar with a window of that number of positions, and with more windows.
func newTierFakeWithSidecarOf(t *testing.T, window int32, more ...tiering.Window) tierFake {
	t.Helper()
	socket := os.Getenv("KVTIER_TEST_SOCKET")
	if socket == "" {
		t.Skip("KVTIER_TEST_SOCKET does not name the socket of a running sidecar")
	}
	f := newTierFakeOf(t, 2, window, socket, more...)
	prompt := tierInputs(100_000, 100_065)
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		f.fill(0, prompt[:64], 0)
		f.finish(0)
		f.drop(0, 0)
		if f.ask(t, 1, prompt) == 64 {
			f.drop(1, 0)
			return f
		}
		if time.Now().After(deadline) {
			t.Fatalf("the sidecar on %s does not store anything", socket)
		}
	}
}

// fill gives a slot inputs whose rows hold (position + salt) in every byte.
func (f tierFake) fill(slot int, inputs []*input.Input, salt byte) {
	cells := f.rows.Find(slot, 0, len(inputs), nil)
	f.write(cells, salt)
	f.rows.Occupy(slot, 0, cells)
	for _, w := range f.windows {
		f.fillWindow(w, slot, len(inputs), salt)
	}
	f.server.cache.slots[slot].Inputs = inputs
}

// fillWindow gives a slot the rows of a window that ends at a position; they hold (position + salt) in every byte.
func (f tierFake) fillWindow(w kvcache.KVTierWindow, slot, end int, salt byte) {
	from := max(0, end-w.Size)
	w.Rows.Drop(slot, 0)
	cells := w.Rows.Find(slot, from, end-from, nil)
	all := make([]byte, len(cells)*tierFakeRowBytes)
	for i := range all {
		all[i] = byte(from+i/tierFakeRowBytes) + salt
	}
	for segment := range 2 {
		w.Rows.Write(segment, cells, rows.Chunk{Data: all})
	}
	w.Rows.Occupy(slot, from, cells)
}

func (f tierFake) write(cells []int32, salt byte) {
	all := make([]byte, len(cells)*tierFakeRowBytes)
	for i := range all {
		all[i] = byte(i/tierFakeRowBytes) + salt
	}
	f.writeBytes(cells, all)
}

func (f tierFake) writeBytes(cells []int32, all []byte) {
	for segment := range f.segments {
		f.rows.Write(segment, cells, rows.Chunk{Data: all})
	}
}

// holds fails unless the slot's positions [from, to) hold (position + salt) in every byte of every segment.
func (f tierFake) holds(t *testing.T, slot, from, to int, salt byte) {
	t.Helper()
	cells := f.rows.Cells(slot, from, to)
	if cells == nil {
		t.Fatalf("positions %d to %d are not in slot %d", from, to, slot)
	}
	back := make([]byte, len(cells)*tierFakeRowBytes)
	for segment := range f.segments {
		f.rows.Read(segment, cells, back)
		for i, got := range back {
			if want := byte(from+i/tierFakeRowBytes) + salt; got != want {
				t.Fatalf("segment %d, position %d: %d, want %d", segment, from+i/tierFakeRowBytes, got, want)
			}
		}
	}
}

// finish ends the sequence of a slot and waits until what is queued has been stored.
func (f tierFake) finish(slot int) {
	f.Lock()
	tierFinished(&Sequence{cache: &f.server.cache.slots[slot]})
	f.Unlock()
	f.flush()
}

func (f tierFake) flush() {
	tierFlush(httptest.NewRecorder(), httptest.NewRequest("POST", "/kvtier/flush", nil))
}

// drop does what stock does when a slot keeps its first rows only.
func (f tierFake) drop(slot int, keep int32) {
	f.Lock()
	defer f.Unlock()
	s := &f.server.cache.slots[slot]
	tierBeforeDiscard(s, keep)
	_ = f.server.cache.cache.Remove(slot, keep, math.MaxInt32)
	s.Inputs = s.Inputs[:keep]
}

// ask does what a request does until its first batch, in a slot that holds nothing of it: it returns where it resumes.
func (f tierFake) ask(t *testing.T, slot int, prompt []*input.Input) int {
	return f.askOf(t, slot, &Sequence{inputs: prompt})
}

func (f tierFake) askOf(t *testing.T, slot int, seq *Sequence) int {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	tierPrefetch(ctx, f.server, seq)
	f.Lock()
	defer f.Unlock()
	s := &f.server.cache.slots[slot]
	resume := tierRestore(s, seq.inputs, 0, true)
	s.Inputs = seq.inputs[:resume]
	return int(resume)
}

func tierInputs(from, to int) []*input.Input {
	var in []*input.Input
	for i := from; i < to; i++ {
		in = append(in, &input.Input{Token: int32(i)})
	}
	return in
}

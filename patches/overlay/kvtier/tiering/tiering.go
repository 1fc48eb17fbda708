// Package tiering is the engine side of the KV tiering: which files of a prompt to read, what of a slot to save and when,
// and what must never be stored. A runner tells it of the turns in a request's life (requests.go), and brings a Host and
// Rows. The package knows no runner, no cache and no backend, and is the same for all of them.
package tiering

import (
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// Tiering is that of the one model that a runner process holds.
//
// Locks, outermost first: the Host's lock, then those that its own methods take. K/V is read and written, and a field
// "guarded by the Host's lock" is used, only while it is held. No call to the sidecar and no file access happens
// under it.
type Tiering struct {
	config      kvtier.Config
	host        Host
	attached    chan struct{} // closed when the model is loaded and what follows is set
	unsupported string        // why the model can't be tiered
	client      *kvtier.Client
	up          func() bool // is there a sidecar to store to?
	rows        Rows
	model       Model
	namespace   kvtier.Namespace

	stats   stats
	memory  memoryBound
	files   fileAccess
	lookUps lookUps
	sound   atomic.Bool            // the model's files are what they are called
	unsound atomic.Pointer[string] // why that is not known yet, as the sidecar said last
	waited  atomic.Bool            // a look-up has waited for its first word in vain
	asked   atomic.Int64           // how often it was begun to be asked for look-ups
	off     atomic.Pointer[string] // why it is, although the model can be tiered; nil: it is on
	reports atomic.Int32           // reports of damage on their way
	late    atomic.Int32           // fetches whose reads still hang although nobody waits for them any more
	staging []byte                 // what is copied out of the cells at once; the snapshot loop's
	refused atomic.Bool            // the sidecar took nothing of this model when it was last asked to
	refusal string                 // why the sidecar stores nothing of this model, as it was last said; the snapshot loop's

	slots   []slot   // guarded by the Host's lock
	pinned  [][]byte // what rows are read into on their way to a device, likewise
	written int      // how often rows may have been written into cells: by a batch, a restore, a shift; likewise

	layouts sync.Map // rows of a block, and its window's child -> *kvtier.Layout
	work    *queue
}

// fileAccess is how blocks are had: open reads nothing, read reads all of a file. Tests put slow disks there.
type fileAccess struct {
	open, read func(path string, size int) (*kvtier.File, error)
}

// Model is what a runner says of the model that it has loaded. Of one that can't be tiered the first four are enough.
type Model struct {
	Path      string              // of its file
	Engine    string              // as the namespace names it
	Attention func() string       // how attention is computed on the CPU, "" where it is not; for reports
	Memory    *tierpb.CacheMemory // where its K/V lie, nil where the runner does not know; for reports
	Settings  *tierpb.RunnerSettings

	Slots   int
	Layers  []kvtier.Layer // that keep every row
	Windows []Window       // of those that do not
	DType   string
	ByRows  bool // tokens do not decide the bits of rows: they follow from how a prompt is cut and who else is computed
	OnHost  bool // the CPU can access all rows directly, as soon as the batch that computes them has been
	// Pinned makes memory that a device copies from at its full speed, which is never given back; nil where there is none.
	Pinned      func(bytes int) []byte
	Description *tierpb.Namespace
	Files       []kvtier.LoadedFile // that it was loaded from, whose names are in Description
}

// ByRowsExtra is what the namespace says of it: blocks that are named otherwise are never found.
func (m Model) ByRowsExtra() string {
	if !m.ByRows {
		return ""
	}
	return kvtier.Part("keys", "rows")
}

var active atomic.Pointer[Tiering]

// Active is the tiering of the loaded model, or nil: not wanted, not possible, or it has failed.
func Active() *Tiering { return active.Load() }

// Guard turns a panic of the tiering into "tiering is off". Deferred by everything that a runner calls.
func Guard(hook string) {
	if r := recover(); r != nil {
		fail(hook, r)
	}
}

func fail(hook string, panicked any) {
	t := active.Swap(nil)
	slog.Error("kv tiering failed and is now off for this model", "hook", hook, "panic", panicked)
	if t != nil {
		t.end(failedReason)
	}
}

// Withdraw turns the tiering off for the loaded model: what was found of it when it was loaded is not so, for this reason. Nothing
// more is restored, and nothing is stored that has not been copied.
func (t *Tiering) Withdraw(reason string) {
	if active.CompareAndSwap(t, nil) {
		slog.Error("kv tiering is now off for this model, it runs as in stock Ollama", "reason", reason)
		t.end(reason)
	}
}

// end tells the sidecar that the model runs as in stock Ollama from now on.
func (t *Tiering) end(reason string) {
	t.off.Store(&reason)
	go func() {
		defer func() { _ = recover() }() // it is off, and has said so
		t.stats.report(t)
	}()
}

// Connect begins to look for the sidecar. Called when the loading of weights begins, so that the first request, which often
// follows the end of it at once, finds it. nil: tiering is not wanted, or not possible here. Attach or Refuse follows.
func Connect(host Host) *Tiering {
	config, ok := kvtier.FromEnv()
	if !ok {
		return nil
	}
	t := &Tiering{config: config, host: host, attached: make(chan struct{}), work: newQueue()}
	client, err := kvtier.NewClient(config.Socket, t.onSidecarUp)
	if err != nil {
		slog.Warn("kv tiering is off", "error", err)
		return nil
	}
	t.client, t.up = client, t.serves
	return t
}

// serves reports whether there is a sidecar that can store this model.
func (t *Tiering) serves() bool { return t.client.Up() && !t.older() }

// older reports whether the sidecar that answered last is of a program that does not know how this one asks.
func (t *Tiering) older() bool { return !t.client.Speaks() }

// NamespaceExtra is what the settings add to a namespace's field "extra".
func (t *Tiering) NamespaceExtra() string { return t.config.NamespaceExtra() }

// Rounds reports whether rows are rounded when they are stored.
func (t *Tiering) Rounds() bool { return t.config.Encoding != "" }

// Attach turns the tiering on for the loaded model. Called when loading is complete, before the first request.
func (t *Tiering) Attach(rows Rows, model Model) {
	t.bind(rows, model)
	slog.Info("kv tiering is on for this model", "layers", len(model.Layers), "block_tokens", kvtier.BlockTokens,
		"namespace", fmt.Sprintf("%x", t.namespace[:8]), "gate", t.config.Gate, "socket", t.config.Socket)
	if t.config.Encoding != "" {
		slog.Warn("kv tiering stores rows rounded, answers after a restore may differ", "encoding", t.config.Encoding)
	}
	active.Store(t)
	go t.snapshotLoop()
	close(t.attached)
	t.client.WaitFirst()
}

func (t *Tiering) bind(rows Rows, model Model) {
	t.rows, t.model, t.namespace = rows, model, kvtier.NamespaceOf(model.Description)
	t.files = fileAccess{kvtier.OpenFile, kvtier.ReadFile}
	t.slots = make([]slot, model.Slots)
	for i := range t.slots {
		t.slots[i] = newSlot(i)
	}
	t.stats.init(t)
}

// Refuse says, in the log and to the sidecar, that the loaded model runs as in stock Ollama and why.
func (t *Tiering) Refuse(reason string, model Model) {
	t.unsupported, t.model = reason, model
	slog.Warn("kv tiering is off for this model, it runs as in stock Ollama", "reason", reason)
	close(t.attached)
	t.client.WaitFirst()
}

// layout is that of so many rows: of a window, or with nil of those that keep every row.
func (t *Tiering) layout(rows int, of *Window) *kvtier.Layout {
	key, layers := [2]int{rows, -1}, t.model.Layers
	if of != nil {
		key[1], layers = of.Child, of.Layers
	}
	if l, ok := t.layouts.Load(key); ok {
		return l.(*kvtier.Layout)
	}
	l, _ := t.layouts.LoadOrStore(key, kvtier.NewLayout(layers, rows))
	return l.(*kvtier.Layout)
}

// onSidecarUp reports the runner and stores what the slots hold and the sidecar may have missed.
func (t *Tiering) onSidecarUp() {
	if files := kvtier.StartedWith(); len(files) > 0 {
		_, _ = t.client.CheckFiles(files) // so that the sidecar reads it while it is loaded
	}
	<-t.attached
	if t.unsupported != "" {
		_ = t.client.Report(t.stats.unsupported(t.model, t.unsupported))
		return
	}
	if t.older() {
		slog.Warn("kv tiering: the sidecar is older than this program and cannot serve it: start `tiering up` anew")
	}
	if t.off.Load() == nil {
		if !t.sound.Load() {
			go t.learnContent(contentWait) // look-ups wait for it; what is to be stored asks by itself
		}
		t.storeAgain()
	}
	t.stats.report(t) // after that, so that it says how much is to be stored
}

// storeAgain queues what the slots hold, from its first block on.
func (t *Tiering) storeAgain() {
	t.host.Lock()
	defer t.host.Unlock()
	for i := range t.slots {
		t.slots[i].lineage.saved, t.slots[i].lineage.windowsAt = 0, 0
		t.slots[i].lineage.refused = false
		t.work.add(t.slots[i].lineage)
	}
}

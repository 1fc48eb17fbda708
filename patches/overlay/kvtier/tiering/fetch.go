package tiering

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

const (
	// getMost bounds the wait for files. It is getLeast, and getShare times what the tier expects, and never longer than
	// computing the prompt; what has come by then is used.
	getMost  = 20 * time.Second
	getLeast = time.Second
	getShare = 4
)

var (
	errMemory = errors.New("no memory to read it into")
	errAnswer = errors.New("the sidecar's answer makes no sense")
)

// fetch is a prompt's stored prefix, in memory or, what the RAM tier has of it, open.
type fetch struct {
	t        *Tiering
	prompt   Prompt
	tokens   []byte  // of the prompt
	held     []*link // blocks that the slot held when it was looked up, where rows name them
	links    []*link // of its whole blocks, from the prompt's first on, where rows name them
	from     int     // first position of blocks[0]
	rows     int     // positions [from, rows) can be restored
	expected float64 // seconds that the tier was expected to take
	blocks   []*fetchedBlock
	windows  []*fetchedWindow // of a model that has windows: all that end at rows
	report   tierpb.RestoreReport
	short    shortfall // why no more of the prompt is worth restoring, as the sidecar says

	release func() // ends the lease
	once    sync.Once
}

func (f *fetch) close() {
	f.once.Do(func() {
		f.release()
		for _, b := range f.blocks {
			b.close()
		}
		for _, w := range f.windows {
			w.close()
		}
	})
}

// request is the question for most rows of the prompt, of which the slot holds the first.
func (f *fetch) request(most, memory int) *tierpb.LookUpRequest {
	t := f.t
	r := &tierpb.LookUpRequest{
		Namespace: t.namespace[:], Tokens: f.tokens, BlockTokens: kvtier.BlockTokens, MostRows: uint32(most),
		MemoryRows: uint32(memory), MinTokens: uint32(t.config.MinTokens), ByRows: t.model.ByRows,
	}
	r.PrefillTokensPerSecond, r.CopyBytesPerSecond = t.stats.speeds()
	for _, x := range f.prompt.Extras {
		r.Extras = append(r.Extras, &tierpb.Extra{Row: x.Row, Digest: x.Digest})
	}
	for _, s := range f.prompt.Spans {
		r.Spans = append(r.Spans, &tierpb.Span{First: uint32(s.First), Last: uint32(s.Last)})
	}
	for _, k := range f.held {
		r.Fingerprints = append(r.Fingerprints, k.fingerprint)
	}
	for i := range t.model.Windows {
		w := &t.model.Windows[i]
		r.Windows = append(r.Windows, &tierpb.WindowSought{
			Child: uint32(w.Child), Size: uint32(w.Size), RowBytes: layerBytes(w.Layers), AtCheckpoints: w.Checkpoints != nil,
		})
	}
	return r
}

// keep gives f the unbroken run of fetched blocks, and lets go of the others. It returns what is wrong with the first of
// those.
func (t *Tiering) keep(f *fetch, keys []kvtier.Key, fetched []*fetchedBlock, failed []error) (bad error) {
	good := 0
	for good < len(fetched) && failed[good] == nil {
		good++
	}
	if good < len(fetched) {
		bad = failed[good]
		slog.Warn("kv block not usable, recomputing from there", "first", f.from+good*kvtier.BlockTokens, "error", bad)
	}
	for i, b := range fetched {
		t.reportDamage(keys[i], failed[i])
		if i >= good && failed[i] == nil {
			b.close()
		}
	}
	f.blocks = fetched[:good]
	for _, b := range f.blocks {
		f.rows = b.first + b.rows
		f.report.Bytes += uint64(b.rows) * t.rowBytes()
		f.report.VerifySeconds += b.check.Seconds()
	}
	return bad
}

// reportDamage tells the sidecar of a block if it is damaged.
func (t *Tiering) reportDamage(key kvtier.Key, err error) {
	if errors.Is(err, kvtier.ErrCorrupt) {
		t.reportUnusable(key, err.Error())
	}
}

// reportUnusable tells the sidecar why a block is of no use; it looks for itself.
func (t *Tiering) reportUnusable(key kvtier.Key, why string) {
	t.reports.Add(1)
	go func() {
		defer t.reports.Add(-1)
		_ = t.client.ReportCorrupt(t.namespace, key, why)
	}()
}

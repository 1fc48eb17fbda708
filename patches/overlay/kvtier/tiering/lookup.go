package tiering

import (
	"context"
	"sync"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// lookUp is what came of looking up the first tokens of a prompt.
type lookUp struct {
	tokens int       // that were looked up: all of the prompt, or those before an image that can't be restored
	memory int       // rows of them that the best slot held then
	short  shortfall // why no more of them can be restored than the fetch holds
	fetch  *fetch    // nil: none can
}

// prefetch asks the sidecar what of the prompt is worth restoring, and opens or reads the blocks. It holds no lock while it waits
// for the sidecar or for a file. Where less than all can be restored it says why.
func (t *Tiering) prefetch(ctx context.Context, p Prompt, inputs int, inMemory func() (slot, rows int)) *lookUp {
	l := &lookUp{tokens: len(p.Tokens)}
	// The last input is always computed: sampling needs its logits. So is all of a span that has it.
	most := min(len(p.Tokens), inputs-1)
	if whole := p.resumable(most); whole < most {
		most, l.tokens = whole, whole
	}
	if reason := t.notAsked(most); reason != unexplained {
		return l.without(reason)
	}
	slot, rows := inMemory()
	l.memory = rows
	if most-l.memory < t.config.MinTokens {
		return l.without(tooShort)
	}
	start := time.Now()
	f := &fetch{t: t, prompt: p, tokens: kvtier.TokenBytes(p.Tokens), held: t.heldBlocks(slot, l.memory), release: func() {}}
	planned, reason := f.read(ctx, f.request(most, l.memory), t.stats.lookupTimeout(most-l.memory))
	l.short = f.short
	switch {
	case reason != unexplained:
		l.short = shortfall{reason: reason}
	case l.short.reason == gateSaysNo:
		t.stats.gated()
	}
	if planned == 0 {
		f.close()
		return l
	}
	f.rows = p.resumable(f.rows)
	t.stats.spent(time.Since(start))
	if f.rows-l.memory < t.config.MinTokens || (len(t.model.Windows) > 0 && f.rows < planned) {
		f.close()
		return l
	}
	if t.config.Measure {
		f.report.MemcpySeconds, f.report.MemcpyAllSeconds = measureMemcpy(f)
	}
	t.host.AwaitBuilt()
	l.fetch = f
	return l
}

// notAsked is why the sidecar is not asked for a prompt of which at most most rows could be restored; unexplained: it is.
func (t *Tiering) notAsked(most int) tierpb.Shortfall {
	switch {
	case most < t.config.MinTokens:
		return tooShort
	case t.config.Gate == kvtier.GateRecompute:
		return recomputeOnly
	case t.late.Load() > 0:
		return readHangs
	case !t.serves():
		return sidecarAway
	case !t.known():
		return unchecked
	}
	return unexplained
}

// without is the look-up of which nothing can be restored, and why.
func (l *lookUp) without(reason tierpb.Shortfall) *lookUp {
	l.short = shortfall{reason: reason}
	return l
}

// explain says why a prompt of so many tokens is computed from resume on. cut is what kept the restore from using all of the
// fetch. A nil look-up was never made, or let go of.
func (l *lookUp) explain(resume, prompt int, cut shortfall) shortfall {
	switch {
	case resume >= prompt-1: // the last token is always computed
		return shortfall{}
	case l == nil:
		return shortfall{reason: notLookedUp}
	case cut.reason != unexplained:
		return cut
	case resume < l.memory:
		return shortfall{reason: memoryGone}
	case l.short.reason != unexplained:
		short := l.short
		if short.at > 0 {
			short.at = max(short.at, resume) // memory may have more, and may have been added to
		}
		return short
	case l.tokens < prompt:
		return shortfall{notText, l.tokens}
	}
	return shortfall{}
}

// close lets go of the fetch, if there is one.
func (l *lookUp) close() {
	if l != nil && l.fetch != nil {
		l.fetch.close()
	}
}

// lookUps are those of the requests that have no slot yet. They have a lock of their own, so that a request of which nothing
// can be restored does not wait for the runner's, which may be held for a batch. The zero value is ready.
type lookUps struct {
	mu sync.Mutex
	of map[any]*lookUp
}

func (s *lookUps) add(request any, l *lookUp) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of == nil {
		s.of = make(map[any]*lookUp)
	}
	s.of[request] = l
}

// take returns a request's look-up, or nil if there is none any more. Whoever takes it closes it.
func (s *lookUps) take(request any) *lookUp {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.of[request]
	delete(s.of, request)
	return l
}

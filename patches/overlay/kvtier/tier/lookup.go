package tier

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

// prefetch looks up how much of the prompt is stored, decides whether restoring pays, and opens or reads the blocks.
// It holds no lock while it waits for the sidecar or for a file. Where less than all can be restored it says why.
func (t *Tier) prefetch(ctx context.Context, p Prompt, inputs int, inMemory func() (slot, rows int)) *lookUp {
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
	encoded := kvtier.TokenBytes(p.Tokens)
	start := time.Now()
	found, err := t.find(ctx, p, encoded, slot, l.memory, t.stats.lookupTimeout(most-l.memory))
	if err != nil {
		return l.without(callReason(err, sidecarLate))
	}
	chain := found.chain
	plan := planFetch(found.blocks, found.held, most)
	plan = plan.until(p.resumable(plan.rows))
	l.short = plan.end(most)
	if plan.rows-l.memory < t.config.MinTokens {
		return l
	}
	windows := len(t.model.Windows) > 0
	if windows {
		matched := plan.rows
		end, seconds := t.lastWindows(p, found.blocks, encoded, l.memory+t.config.MinTokens, matched)
		if plan = plan.until(end); end < matched {
			l.short = t.windowShortfall(matched, end)
		}
		if plan.windowSeconds = seconds; end-l.memory < t.config.MinTokens {
			return l
		}
	}
	if !t.stats.restorePays(plan.rows-l.memory, plan.bytes+t.windowBytes(plan.rows), plan.seconds+plan.windowSeconds) {
		return l.without(gateSaysNo)
	}
	f := &fetch{prompt: p, from: plan.from, rows: plan.from, links: found.links, release: func() {}}
	f.report.LookupSeconds = time.Since(start).Seconds()
	began, reason := time.Now(), unexplained
	timeout := t.stats.getTimeout(plan.rows-plan.from, plan.seconds+plan.windowSeconds)
	if windows {
		reason = t.fetchWindows(ctx, timeout, f, plan, chain, encoded)
	}
	if reason == unexplained {
		reading := time.Since(began)
		reason = t.fetch(ctx, timeout-reading, f, plan, chain, encoded)
		f.report.FetchSeconds += reading.Seconds()
	}
	if reason != unexplained {
		l.short = shortfall{reason: reason}
	}
	f.rows = p.resumable(f.rows)
	t.stats.spent(time.Since(start))
	if f.rows-l.memory < t.config.MinTokens || (windows && f.rows < plan.rows) {
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

// notAsked is why the sidecar is not asked for a prompt of which so many rows could be restored; unexplained: it is.
func (t *Tier) notAsked(most int) tierpb.Shortfall {
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

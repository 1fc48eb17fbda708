package tiering

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// asked is one request in slot 0, from its look-up to its end.
type asked struct {
	prompt  []int32
	looked  int // tokens of the prompt that are looked up, -1 for none
	memory  int // rows of it in the slot when it is looked up
	found   int // rows of it there when it has got the slot
	between func()
}

// end does what a runner does for the request, and returns what was counted of it.
func (a asked) end(t *testing.T, tier *Tiering) *tierpb.RunnerReport {
	t.Helper()
	if a.memory > 0 {
		tier.fillCells(0, a.memory, 0)
	}
	if a.looked >= 0 {
		tier.Prefetch(t.Context(), &a.prompt[0], Text(a.prompt[:a.looked]), len(a.prompt), tier.held0)
	}
	if a.found > a.memory {
		tier.rows.Occupy(0, a.memory, tier.rows.Find(0, a.memory, a.found-a.memory, nil))
	}
	tier.rows.Drop(0, a.found)
	if a.between != nil {
		a.between()
	}
	tier.restoreFor(0, a.prompt, a.found)
	tier.host.Lock()
	tier.Finished(0, Text(a.prompt), time.Second)
	tier.host.Unlock()
	tier.stats.mu.Lock()
	defer tier.stats.mu.Unlock()
	return &tier.stats.counts
}

// changed is a prompt that begins with so many of the stored tokens.
func changed(same, tokens int) []int32 {
	return append(tokensFrom(0, same), tokensFrom(5000, 5000+tokens-same)...)
}

func TestEveryRequestThatFallsShortHasOneReason(t *testing.T) {
	whole := tokensFrom(0, 200)
	reached := make(map[tierpb.Shortfall]bool)
	for _, c := range []struct {
		name   string
		reason tierpb.Shortfall
		stored int
		where  tierpb.Tier
		asked  asked
		before func(t *testing.T, tier *Tiering, store *sidecar)
		cells  int // that are free when it has got its slot, if not all
		resume int
		at     int
	}{
		{name: "an empty store", reason: nothingStored, asked: asked{prompt: whole}},
		{name: "other words from the start", reason: nothingStored, stored: 192, asked: asked{prompt: changed(0, 200)}},
		{name: "the rest is new", reason: storedEnds, stored: 128, asked: asked{prompt: whole}, resume: 128, at: 128},
		{name: "the rest is new after a tail", reason: storedEnds, stored: 74, asked: asked{prompt: whole}, resume: 74, at: 74},
		{
			name: "memory has more than the store", reason: storedEnds, stored: 64,
			asked: asked{prompt: whole, memory: 100, found: 100}, resume: 100, at: 100,
		},
		{
			name: "another request has added to memory meanwhile", reason: storedEnds, stored: 128,
			asked: asked{prompt: whole, found: 150}, resume: 150, at: 150,
		},
		{name: "a changed middle", reason: storedDiffers, stored: 192, asked: asked{prompt: changed(100, 200)}, resume: 100, at: 100},
		{
			name: "a changed beginning", reason: storedDiffers, stored: 192, asked: asked{prompt: changed(30, 200)}, at: 30,
			before: func(_ *testing.T, tier *Tiering, _ *sidecar) { tier.config.MinTokens = 64 },
		},
		{
			name: "the model's file is still being checked", reason: unchecked, stored: 192, asked: asked{prompt: whole},
			before: func(_ *testing.T, tier *Tiering, _ *sidecar) { tier.sound.Store(false) },
		},
		{
			name: "a short prompt", reason: tooShort, stored: 192, asked: asked{prompt: whole[:64]},
			before: func(_ *testing.T, tier *Tiering, _ *sidecar) { tier.config.MinTokens = 64 },
		},
		{
			name: "a short rest", reason: tooShort, stored: 192, asked: asked{prompt: whole, memory: 150, found: 150}, resume: 150,
			before: func(_ *testing.T, tier *Tiering, _ *sidecar) { tier.config.MinTokens = 64 },
		},
		{
			name: "a short rest once it has a slot", reason: tooShort, stored: 256, asked: asked{prompt: whole, found: 150}, resume: 150,
			before: func(_ *testing.T, tier *Tiering, _ *sidecar) { tier.config.MinTokens = 64 },
		},
		{
			name: "the gate", reason: gateSaysNo, stored: 192, asked: asked{prompt: whole},
			before: func(_ *testing.T, tier *Tiering, store *sidecar) {
				tier.stats.gate, store.seconds = kvtier.GateAuto, 1e6
			},
		},
		{
			name: "the settings", reason: recomputeOnly, stored: 192, asked: asked{prompt: whole},
			before: func(_ *testing.T, tier *Tiering, _ *sidecar) { tier.config.Gate = kvtier.GateRecompute },
		},
		{
			name: "no sidecar", reason: sidecarAway, stored: 192, asked: asked{prompt: whole},
			before: func(t *testing.T, tier *Tiering, _ *sidecar) {
				client, err := kvtier.NewClient(t.TempDir()+"/none.sock", nil)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(client.Close)
				tier.client = client
			},
		},
		{
			name: "a sidecar that breaks off", reason: sidecarAway, stored: 192, asked: asked{prompt: whole},
			before: func(_ *testing.T, _ *Tiering, store *sidecar) {
				store.has = func(context.Context) error { return status.Error(codes.Unavailable, "the tier is away") }
			},
		},
		{
			name: "a sidecar that says nothing", reason: sidecarLate, stored: 192, asked: asked{prompt: whole},
			before: func(_ *testing.T, tier *Tiering, store *sidecar) {
				tier.stats.prefillRate = 1e9
				store.has = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
			},
		},
		{
			name: "a sidecar with a bug", reason: sidecarError, stored: 192, asked: asked{prompt: whole},
			before: func(_ *testing.T, _ *Tiering, store *sidecar) {
				store.has = func(context.Context) error { return status.Error(codes.Internal, "a bug") }
			},
		},
		{
			name: "a bug in the middle", reason: sidecarError, stored: 192, asked: asked{prompt: whole}, resume: 128,
			before: func(_ *testing.T, _ *Tiering, store *sidecar) {
				store.get = func(context.Context) error { return status.Error(codes.Internal, "a bug") }
			},
		},
		{
			name: "no memory", reason: noMemory, stored: 192, where: tierpb.Tier_TIER_LOCAL, asked: asked{prompt: whole},
			before: func(_ *testing.T, tier *Tiering, _ *sidecar) { tier.memory.available = func() int { return 0 } },
		},
		{
			name: "little memory", reason: noMemory, stored: 192, where: tierpb.Tier_TIER_LOCAL, asked: asked{prompt: whole}, resume: 64,
			before: func(_ *testing.T, tier *Tiering, store *sidecar) {
				tier.memory.available = func() int { return memoryShare * store.blocks[0].size }
			},
		},
		{
			name: "little memory for what was moved to the disk", reason: noMemory, stored: 192, asked: asked{prompt: whole}, resume: 64,
			before: func(_ *testing.T, tier *Tiering, store *sidecar) {
				store.read = tierpb.Tier_TIER_LOCAL
				tier.memory.available = func() int { return memoryShare * store.blocks[0].size }
			},
		},
		{
			name: "damage on the disk", reason: damaged, stored: 192, where: tierpb.Tier_TIER_LOCAL, asked: asked{prompt: whole}, resume: 64,
			before: func(t *testing.T, tier *Tiering, store *sidecar) { store.change(t, tier, 1, 3, 0) },
		},
		{
			name: "damage in memory", reason: damaged, stored: 192, asked: asked{prompt: whole}, resume: 128,
			before: func(t *testing.T, tier *Tiering, store *sidecar) { store.change(t, tier, 2, 3, 0) },
		},
		{
			name: "damage at the start", reason: damaged, stored: 192, asked: asked{prompt: whole},
			before: func(t *testing.T, tier *Tiering, store *sidecar) { store.change(t, tier, 0, 3, 0) },
		},
		{
			name: "a file that cannot be opened", reason: unreadable, stored: 192, asked: asked{prompt: whole}, resume: 64,
			before: func(t *testing.T, _ *Tiering, store *sidecar) {
				if err := os.Remove(store.blocks[1].path); err != nil {
					t.Fatal(err)
				}
			},
		},
		{
			name: "evicted since the look-up", reason: blocksGone, stored: 192, asked: asked{prompt: whole}, resume: 128,
			before: func(_ *testing.T, _ *Tiering, store *sidecar) { store.gone = true },
		},
		{
			name: "a slow disk", reason: filesLate, stored: 192, asked: asked{prompt: whole}, resume: 128,
			before: func(_ *testing.T, _ *Tiering, store *sidecar) {
				store.get = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
			},
		},
		{
			name: "a read that hangs", reason: readHangs, stored: 192, asked: asked{prompt: whole},
			before: func(_ *testing.T, tier *Tiering, _ *sidecar) { tier.late.Add(1) },
		},
		{name: "few free cells", reason: noCells, stored: 192, asked: asked{prompt: whole}, cells: 100, resume: 100},
		{
			name: "too few free cells", reason: noCells, stored: 192, asked: asked{prompt: whole}, cells: 63,
			before: func(_ *testing.T, tier *Tiering, _ *sidecar) { tier.config.MinTokens = 64 },
		},
		{
			name: "after a context shift", reason: shifted, stored: 192, asked: asked{prompt: whole, memory: 20, found: 20}, resume: 20,
			before: func(_ *testing.T, tier *Tiering, _ *sidecar) { tier.slots[0].taint = 19 },
		},
		{name: "memory that it was to go on from", reason: memoryGone, stored: 192, asked: asked{prompt: whole, memory: 70}},
		{name: "all of it was in memory", reason: memoryGone, asked: asked{prompt: whole, memory: 199, found: 60}, resume: 60},
		{name: "an image at the start", reason: notLookedUp, stored: 192, asked: asked{prompt: whole, looked: -1}},
		{name: "an image in it", reason: notText, stored: 192, asked: asked{prompt: whole, looked: 130}, resume: 130, at: 130},
		{
			name: "a window in the middle of a content", reason: windowMissing, stored: 192, asked: asked{prompt: changed(100, 200)}, at: 100,
			before: func(_ *testing.T, tier *Tiering, _ *sidecar) { tier.model.Windows = []Window{{Size: 32}} },
		},
		{
			name: "states of no checkpoint", reason: stateMissing, stored: 192, asked: asked{prompt: whole},
			before: func(_ *testing.T, tier *Tiering, _ *sidecar) {
				tier.model.Windows = []Window{{Size: 1, Checkpoints: func(int) []int { return nil }}}
			},
		},
		{
			name: "cells that are not as they should be", reason: restoreFailed, stored: 192, asked: asked{prompt: whole},
			before: func(_ *testing.T, tier *Tiering, _ *sidecar) { tier.rows = gapped{tier.rows.(*fakeRows)} },
		},
	} {
		reached[c.reason] = true
		t.Run(c.name, func(t *testing.T) {
			if c.where == tierpb.Tier_TIER_UNSPECIFIED {
				c.where = tierpb.Tier_TIER_RAM
			}
			tier, store := withSidecar(t, 2, c.stored, c.where)
			if c.before != nil {
				c.before(t, tier, store)
			}
			if c.asked.looked == 0 {
				c.asked.looked = len(c.asked.prompt)
			}
			if c.cells > 0 {
				c.asked.between = func() { tier.fillCells(1, fakeCells-c.cells, 0) }
			}
			n := c.asked.end(t, tier)
			last, prompt := n.LastRequest, len(c.asked.prompt)
			if got := int(last.MemoryTokens + last.RestoredTokens); got != c.resume || int(last.PromptTokens) != prompt {
				t.Errorf("resumes at %d of %d, want %d of %d", got, last.PromptTokens, c.resume, prompt)
			}
			if last.Shortfall != c.reason || int(last.AtToken) != c.at {
				t.Errorf("%v at %d, want %v at %d", last.Shortfall, last.AtToken, c.reason, c.at)
			}
			if len(n.Shortfalls) != 1 || n.Shortfalls[0].Reason != c.reason || n.Shortfalls[0].Requests != 1 ||
				int(n.Shortfalls[0].Tokens) != prompt-c.resume {
				t.Errorf("counted %v", n.Shortfalls)
			}
		})
	}
	for number, name := range tierpb.Shortfall_name {
		if reason := tierpb.Shortfall(number); reason != unexplained && !reached[reason] {
			t.Errorf("no request came to %s", name)
		}
	}
}

func TestARequestOfWhichAllButTheLastTokenCameBackFallsNotShort(t *testing.T) {
	for name, a := range map[string]asked{
		"restored":            {prompt: tokensFrom(0, 200)},
		"from memory":         {prompt: changed(0, 200), memory: 199, found: 199},
		"from both":           {prompt: tokensFrom(0, 200), memory: 100, found: 100},
		"a token":             {prompt: changed(0, 1)},
		"memory came to have": {prompt: changed(0, 200), found: 199},
	} {
		t.Run(name, func(t *testing.T) {
			tier, _ := withSidecar(t, 1, 256, tierpb.Tier_TIER_RAM)
			a.looked = len(a.prompt)
			n := a.end(t, tier)
			if n.RecomputedTokens != 1 || len(n.Shortfalls) != 0 || n.LastRequest.Shortfall != unexplained {
				t.Errorf("counted %v", n)
			}
		})
	}
}

func TestReasonsAreCountedOverAllRequests(t *testing.T) {
	tier, _ := withSidecar(t, 1, 128, tierpb.Tier_TIER_RAM)
	var n *tierpb.RunnerReport
	for _, prompt := range [][]int32{changed(0, 300), tokensFrom(0, 150), changed(0, 40), tokensFrom(0, 129)} {
		n = asked{prompt: prompt, looked: len(prompt)}.end(t, tier)
		tier.rows.Drop(0, 0)
	}
	if n.LastRequest.RestoredTokens != 128 || n.LastRequest.Shortfall != unexplained {
		t.Errorf("the last request: %v", n.LastRequest)
	}
	want := map[tierpb.Shortfall][2]uint64{nothingStored: {2, 340}, storedEnds: {1, 22}}
	if len(n.Shortfalls) != len(want) {
		t.Errorf("counted %v", n.Shortfalls)
	}
	for _, c := range n.Shortfalls {
		if want[c.Reason] != [2]uint64{c.Requests, c.Tokens} {
			t.Errorf("counted %v, want %v", c, want[c.Reason])
		}
	}
}

// Whatever comes together: a request that computes more than its last token has one reason, and one that blames what is
// stored has been given all of that, up to what is not worth it.
func TestNoRequestFallsShortInSilence(t *testing.T) {
	content := []tierpb.Shortfall{nothingStored, storedEnds, storedDiffers, notText}
	seen := make(map[tierpb.Shortfall]bool)
	for seed := range 120 {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(7, uint64(seed)))
			one := func(in int) bool { return r.IntN(in) == 0 }
			where := tierpb.Tier_TIER_RAM
			if one(2) {
				where = tierpb.Tier_TIER_LOCAL
			}
			stored, tokens := r.IntN(300), 1+r.IntN(300)
			same := r.IntN(tokens + 1)
			tier, store := withSidecar(t, 2, stored, where)
			if one(2) {
				tier.config.MinTokens = 64
			}
			if one(8) {
				tier.memory.available = func() int { return memoryShare * r.IntN(1<<17) }
			}
			if stored > 0 && one(6) {
				store.change(t, tier, r.IntN(len(store.blocks)), 0, 0)
			}
			store.gone = one(8)
			if one(8) {
				store.seconds, tier.stats.gate = 1e6, kvtier.GateAuto
			}
			if one(8) {
				tier.slots[0].taint = r.IntN(tokens)
			}
			a := asked{prompt: changed(same, tokens), looked: tokens}
			if one(2) {
				a.memory = r.IntN(tokens)
			}
			a.found = a.memory
			if one(4) {
				a.found = r.IntN(tokens)
			}
			if one(6) {
				a.looked = 1 + r.IntN(tokens)
				a.memory = min(a.memory, a.looked)
			}
			if one(6) {
				cells := r.IntN(400)
				a.between = func() { tier.fillCells(1, fakeCells-a.found-cells, 0) }
			}
			n := a.end(t, tier)
			reason, resume := n.LastRequest.Shortfall, int(n.LastRequest.MemoryTokens+n.LastRequest.RestoredTokens)
			if resume >= tokens-1 {
				if len(n.Shortfalls) != 0 || reason != unexplained {
					t.Errorf("nothing is missing, and counted is %v", n.Shortfalls)
				}
				return
			}
			seen[reason] = true
			if reason == unexplained || len(n.Shortfalls) != 1 || n.Shortfalls[0].Reason != reason ||
				n.Shortfalls[0].Requests != 1 || n.Shortfalls[0].Tokens != n.RecomputedTokens {
				t.Fatalf("resumes at %d of %d, %v: counted %v", resume, tokens, reason, n.Shortfalls)
			}
			match := min(stored, same, a.looked, tokens-1)
			if worth := match-max(a.memory, a.found) >= tier.config.MinTokens; worth && a.found >= a.memory &&
				resume < match && slices.Contains(content, reason) {
				t.Errorf("resumes at %d, %d are stored: %v", resume, match, reason)
			}
		})
	}
	if len(seen) < 10 {
		t.Errorf("only %v came up", seen)
	}
}

package tiering

import (
	"bytes"
	"context"
	"slices"
	"testing"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// picture is an image's digest.
func picture(number byte) []byte { return append(make([]byte, 31), number) }

func TestNobodyResumesInsideOfASpan(t *testing.T) {
	one, two := Span{10, 14}, Span{20, 20}
	next, over := Span{15, 18}, Span{14, 18} // begins after the first one, or with its last
	for _, c := range []struct {
		spans    []Span
		at, want int
	}{
		{nil, 7, 7},
		{[]Span{one}, 9, 9},
		{[]Span{one}, 10, 10}, // all of it is still to be computed
		{[]Span{one}, 11, 10},
		{[]Span{one}, 14, 10},
		{[]Span{one}, 15, 15}, // all of it has been computed
		{[]Span{one, two}, 20, 20},
		{[]Span{one, two}, 21, 21}, // of one position
		{[]Span{one, next}, 15, 15},
		{[]Span{one, next}, 16, 15},
		{[]Span{one, next}, 18, 15},
		{[]Span{one, over}, 15, 10}, // where the one may be gone on from the other may not
		{[]Span{one, over}, 16, 10},
		{[]Span{one, over}, 19, 19},
	} {
		if got := (Prompt{Spans: c.spans}).resumable(c.at); got != c.want {
			t.Errorf("spans %v: %d is brought to %d, want %d", c.spans, c.at, got, c.want)
		}
	}
}

func TestAPromptEndsBeforeASpanThatIsNotWhole(t *testing.T) {
	extras := []kvtier.Extra{{Row: 3, Digest: picture(1)}, {Row: 22, Digest: picture(2)}}
	p := Prompt{Tokens: tokensFrom(0, 30), Extras: extras, Spans: []Span{{3, 9}, {20, 30}}}
	got := p.Whole()
	if len(got.Tokens) != 20 || len(got.Extras) != 1 || !slices.Equal(got.Spans, []Span{{3, 9}}) {
		t.Errorf("%d tokens, extras %v, spans %v", len(got.Tokens), got.Extras, got.Spans)
	}
	p.Spans[1].Last = 29
	if got := p.Whole(); len(got.Tokens) != 30 || len(got.Extras) != 2 || len(got.Spans) != 2 {
		t.Errorf("one that is whole: %d tokens, extras %v, spans %v", len(got.Tokens), got.Extras, got.Spans)
	}
}

func TestWhatStandsBesideTokensIsSaidOfABlock(t *testing.T) {
	tier := fake(t, 1)
	extras := []kvtier.Extra{{Row: 70, Digest: picture(1)}, {Row: 140, Digest: picture(2)}, {Row: 145, Digest: picture(2)}}
	p := Prompt{Tokens: tokensFrom(0, 150), Extras: extras}
	ts := &tier.slots[0]
	ts.note(Prompt{Tokens: p.Tokens[:100], Extras: extras[:1]}, nil)
	ts.lineage.plan(tier)
	ts.note(p, nil)
	ts.lineage.finished = true
	ts.lineage.plan(tier)
	text, n := tier.textOf(ts.lineage.blocks)
	if n != 3 || len(text.Extras) != len(extras) || !bytes.Equal(text.Tokens, kvtier.TokenBytes(p.Tokens)) {
		t.Fatalf("%d blocks of %v", n, text)
	}
	for i, x := range text.Extras {
		if x.Row != extras[i].Row || !bytes.Equal(x.Digest, extras[i].Digest) {
			t.Errorf("extra %d is at row %d", i, x.Row)
		}
	}
}

func TestBlocksOfTwoTextsAreNamedApart(t *testing.T) {
	tier := fake(t, 1)
	ts := &tier.slots[0]
	ts.note(Text(tokensFrom(0, 100)), nil)
	ts.lineage.finished = true
	ts.lineage.plan(tier)
	ts.note(Text(tokensFrom(0, 90)), nil) // a stop string was cut off
	ts.note(Text(append(tokensFrom(0, 90), tokensFrom(500, 600)...)), nil)
	ts.lineage.plan(tier)
	blocks := ts.lineage.blocks
	if got := rowsOf(blocks); !slices.Equal(got, [][2]int{{0, 64}, {64, 36}, {64, 64}, {128, 62}}) {
		t.Fatalf("planned %v", got)
	}
	first, n := tier.textOf(blocks)
	if n != 2 || !bytes.Equal(first.Tokens, kvtier.TokenBytes(tokensFrom(0, 100))) {
		t.Errorf("%d blocks of %d bytes of tokens", n, len(first.Tokens))
	}
	second, n := tier.textOf(blocks[2:])
	if n != 2 || !bytes.Equal(second.Tokens, kvtier.TokenBytes(append(tokensFrom(0, 90), tokensFrom(500, 600)...))) {
		t.Errorf("%d blocks of %d bytes of tokens", n, len(second.Tokens))
	}
	if b := second.Blocks[0]; b.FirstRow != 64 || b.Rows != 64 {
		t.Errorf("the first is %v", b)
	}
}

// The sidecar of these tests does not look at images, and so answers what is wrong.
func TestABlockOfTextIsNotTakenForOneWithAnImage(t *testing.T) {
	for at, want := range map[int]int{0: 0, 5: 0, 64: 64, 70: 64, 128: 128, 149: 128, 500: 150} {
		tier := withSidecarOnly(t, 150)
		tokens := tokensFrom(0, 200)
		p := Prompt{Tokens: tokens, Extras: []kvtier.Extra{{Row: uint32(at), Digest: picture(1)}}}
		tier.Prefetch(t.Context(), &tokens[0], p, len(tokens), tier.held0)
		if got := tier.restoreFor(0, tokens, 0); got != want {
			t.Errorf("an image at %d, and the store has none: resumes at %d, want %d", at, got, want)
		}
	}
}

func TestARestoreThatFallsShortEndsBeforeASpan(t *testing.T) {
	for name, c := range map[string]struct {
		stored         int
		span           Span
		memory         int
		damage         int  // block that is damaged; -1: none
		late           bool // damaged after it has been fetched
		cells, resumes int
	}{
		"none inside":                    {192, Span{20, 40}, 0, -1, false, fakeCells, 191},
		"the end of the prompt":          {192, Span{180, 195}, 0, -1, false, fakeCells, 180},
		"the end of what is stored":      {150, Span{140, 160}, 0, -1, false, fakeCells, 140},
		"damage found when it is read":   {192, Span{100, 140}, 0, 2, false, fakeCells, 100},
		"damage found when it is copied": {192, Span{100, 140}, 0, 2, true, fakeCells, 100},
		"a span that ends at the damage": {192, Span{100, 127}, 0, 2, true, fakeCells, 128},
		"too few cells":                  {192, Span{40, 60}, 0, -1, false, 50, 40},
		"cells for the span":             {192, Span{40, 60}, 0, -1, false, 61, 61},
		"memory ends inside":             {192, Span{60, 80}, 70, 1, true, fakeCells, 70},
	} {
		t.Run(name, func(t *testing.T) {
			tier, store := withSidecar(t, 2, c.stored, tierpb.Tier_TIER_RAM)
			tokens := tokensFrom(0, 3*64)
			p := Prompt{Tokens: tokens, Spans: []Span{c.span}}
			if c.memory > 0 {
				tier.fillCells(0, c.memory, 0)
			}
			change := func(late bool) {
				if c.damage >= 0 && c.late == late {
					store.change(t, tier, c.damage, 3, 0)
				}
			}
			if !c.late {
				store.read = tierpb.Tier_TIER_LOCAL // read, and checked
			}
			change(false)
			if c.cells < fakeCells {
				tier.fillCells(1, fakeCells-c.cells, 0)
			}
			tier.Prefetch(context.Background(), &tokens[0], p, len(tokens), tier.held0)
			change(true)
			if got := tier.restoreFor(0, tokens, c.memory); got != c.resumes {
				t.Fatalf("resumes at %d, want %d", got, c.resumes)
			}
			holds(t, tier, 0, c.memory, c.resumes)
		})
	}
}

func TestNothingIsReadBehindTheStartOfASpanThatIsNotStoredWhole(t *testing.T) {
	tier, store := withSidecar(t, 1, 150, tierpb.Tier_TIER_RAM)
	tokens := tokensFrom(0, 192)
	tier.Prefetch(t.Context(), &tokens[0], Prompt{Tokens: tokens, Spans: []Span{{120, 160}}}, len(tokens), tier.held0)
	if got := tier.restoreFor(0, tokens, 0); got != 120 || store.asked != 2 {
		t.Errorf("resumes at %d, %d blocks were read", got, store.asked)
	}
}

func TestASpanThatHasTheLastInputIsSaidToBeComputed(t *testing.T) {
	tier := withSidecarOnly(t, 192)
	tokens := tokensFrom(0, 192)
	l := tier.prefetch(t.Context(), Prompt{Tokens: tokens, Spans: []Span{{180, 191}}}, len(tokens), tier.held0)
	defer l.close()
	if got := l.explain(180, len(tokens), shortfall{}); got != (shortfall{notText, 180}) {
		t.Errorf("why it is computed: %v", got)
	}
}

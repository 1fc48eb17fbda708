package api

import (
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"
	"time"
)

func encoded(t *testing.T, value any) string {
	t.Helper()
	data, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestCachedTokensAreInAnswersOnlyWithTheTieringOn(t *testing.T) {
	const counted, none = `{"prompt_eval_count":9,"prompt_eval_cached_count":4}`, `{"prompt_eval_count":9}`
	for setting, want := range map[string]string{"1": counted, "": none, "0": none} {
		t.Setenv("OLLAMA_KV_TIERING", setting)
		if got := encoded(t, Metrics{PromptEvalCount: 9, CachedMetrics: CountCached(4)}); got != want {
			t.Errorf("OLLAMA_KV_TIERING=%q: %s, want %s", setting, got, want)
		}
		if got := encoded(t, Metrics{PromptEvalCount: 9}); got != none {
			t.Errorf("OLLAMA_KV_TIERING=%q, not counted: %s, want %s", setting, got, none)
		}
	}
}

func TestNoneFoundIsSaid(t *testing.T) {
	t.Setenv("OLLAMA_KV_TIERING", "1")
	for _, answer := range []any{
		ChatResponse{Metrics: Metrics{CachedMetrics: CountCached(0)}},
		GenerateResponse{Metrics: Metrics{CachedMetrics: CountCached(0)}},
	} {
		if got := encoded(t, answer); strings.Count(got, `"prompt_eval_cached_count":0`) != 1 {
			t.Errorf("%T: %s", answer, got)
		}
	}
}

func TestCachedTokensAreReadBackAndNeverMoreThanThePrompt(t *testing.T) {
	for text, want := range map[string]struct {
		tokens int
		ok     bool
	}{
		`{"prompt_eval_count":9}`:                                 {0, false},
		`{"prompt_eval_count":9,"prompt_eval_cached_count":null}`: {0, false},
		`{"prompt_eval_count":9,"prompt_eval_cached_count":0}`:    {0, true},
		`{"prompt_eval_count":9,"prompt_eval_cached_count":4}`:    {4, true},
		`{"prompt_eval_count":9,"prompt_eval_cached_count":10}`:   {9, true},
		`{"prompt_eval_count":9,"prompt_eval_cached_count":-1}`:   {0, true},
	} {
		var m Metrics
		if err := json.Unmarshal([]byte(text), &m); err != nil {
			t.Fatal(err)
		}
		if tokens, ok := m.Cached(); tokens != want.tokens || ok != want.ok {
			t.Errorf("%s: %d, %v, want %v", text, tokens, ok, want)
		}
	}
}

func summary(t *testing.T, m Metrics) string {
	t.Helper()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stderr := os.Stderr
	os.Stderr = write
	m.Summary()
	os.Stderr = stderr
	write.Close()
	said, err := io.ReadAll(read)
	if err != nil {
		t.Fatal(err)
	}
	return string(said)
}

func TestTheSummaryNamesCachedTokensAndLeavesThemOutOfTheRate(t *testing.T) {
	m := Metrics{PromptEvalCount: 10, PromptEvalDuration: time.Second}
	stock := "prompt eval count:    10 token(s)\nprompt eval duration: 1s\nprompt eval rate:     10.00 tokens/s\n"
	if got := summary(t, m); got != stock {
		t.Errorf("not counted: %q", got)
	}
	m.CachedMetrics = CountCached(0)
	if got := summary(t, m); got != stock {
		t.Errorf("none found: %q", got)
	}
	m.CachedMetrics = CountCached(4)
	want := "prompt eval count:    10 token(s)\nprompt eval cached:   4 token(s)\nprompt eval duration: 1s\nprompt eval rate:     6.00 tokens/s\n"
	if got := summary(t, m); got != want {
		t.Errorf("4 found: %q", got)
	}
	if m.PromptEvalCount != 10 {
		t.Error("the summary changed the metrics")
	}
}

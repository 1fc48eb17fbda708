package anthropic

import (
	"encoding/json"
	"testing"

	"github.com/ollama/ollama/api"
)

func encoded(t *testing.T, value any) string {
	t.Helper()
	data, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

var usages = map[string]api.CachedMetrics{
	`{"input_tokens":10,"output_tokens":3}`:                             {},
	`{"input_tokens":10,"output_tokens":3,"cache_read_input_tokens":0}`: api.CountCached(0),
	`{"input_tokens":6,"output_tokens":3,"cache_read_input_tokens":4}`:  api.CountCached(4),
}

func last(cached api.CachedMetrics) api.ChatResponse {
	return api.ChatResponse{
		Message: api.Message{Role: "assistant", Content: "hi"},
		Done:    true,
		Metrics: api.Metrics{PromptEvalCount: 10, EvalCount: 3, CachedMetrics: cached},
	}
}

func TestCachedTokensAreNotAmongTheInput(t *testing.T) {
	for want, cached := range usages {
		if got := encoded(t, ToMessagesResponse("msg", last(cached)).Usage); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestTheLastUsageOfAStreamIsThatOfTheMessage(t *testing.T) {
	for want, cached := range usages {
		c := NewStreamConverter("msg", "m", 77)
		first := c.Process(api.ChatResponse{Message: api.Message{Role: "assistant", Content: "hi"}})
		start := first[0].Data.(MessageStartEvent).Message.Usage
		if got := encoded(t, start); got != `{"input_tokens":77,"output_tokens":0}` {
			t.Errorf("nothing is known at the start but stock's guess: %s", got)
		}
		events := c.Process(last(cached))
		if got := encoded(t, events[len(events)-2].Data.(MessageDeltaEvent).Usage); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestAStreamOfOneMessageSaysTheSameAtItsStart(t *testing.T) {
	events := NewStreamConverter("msg", "m", 77).Process(last(api.CountCached(4)))
	start := events[0].Data.(MessageStartEvent).Message.Usage
	if got := encoded(t, start); got != `{"input_tokens":6,"output_tokens":0,"cache_read_input_tokens":4}` {
		t.Error(got)
	}
}

package openai

import (
	"encoding/json"
	"testing"

	"github.com/ollama/ollama/api"
)

func counted(cached api.CachedMetrics) api.Metrics {
	return api.Metrics{PromptEvalCount: 10, EvalCount: 3, CachedMetrics: cached}
}

func encoded(t *testing.T, value any) string {
	t.Helper()
	data, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestUsageCountsCachedTokensAmongThePrompts(t *testing.T) {
	const stock = `{"prompt_tokens":10,"completion_tokens":3,"total_tokens":13}`
	const none = `{"prompt_tokens":10,"completion_tokens":3,"total_tokens":13,"prompt_tokens_details":{"cached_tokens":0}}`
	const four = `{"prompt_tokens":10,"completion_tokens":3,"total_tokens":13,"prompt_tokens_details":{"cached_tokens":4}}`
	for want, cached := range map[string]api.CachedMetrics{stock: {}, none: api.CountCached(0), four: api.CountCached(4)} {
		m := counted(cached)
		if got := encoded(t, ToUsage(api.ChatResponse{Metrics: m})); got != want {
			t.Errorf("chat: %s, want %s", got, want)
		}
		if got := encoded(t, ToUsageGenerate(api.GenerateResponse{Metrics: m})); got != want {
			t.Errorf("completion: %s, want %s", got, want)
		}
	}
}

// usageOf is the usage of a response that ends with r, as a client gets it.
func usageOf(t *testing.T, r api.ChatResponse, stream bool) string {
	t.Helper()
	var request ResponsesRequest
	if !stream {
		response := ToResponse("m", "resp", "msg", r, request)
		response.SetCached(r.Metrics)
		return encoded(t, response.Usage)
	}
	events := NewResponsesStreamConverter("resp", "msg", "m", request).Process(r)
	last := encoded(t, events[len(events)-1].Data)
	var completed struct {
		Response struct {
			Usage ResponsesUsage `json:"usage"`
		} `json:"response"`
	}
	if err := json.Unmarshal([]byte(last), &completed); err != nil {
		t.Fatal(err)
	}
	return encoded(t, completed.Response.Usage)
}

func TestAResponseCountsCachedTokensAmongItsInput(t *testing.T) {
	for tokens, cached := range map[string]api.CachedMetrics{"0": {}, "4": api.CountCached(4)} {
		r := api.ChatResponse{Message: api.Message{Role: "assistant", Content: "hi"}, Done: true, Metrics: counted(cached)}
		want := `{"input_tokens":10,"output_tokens":3,"total_tokens":13,"input_tokens_details":{"cached_tokens":` + tokens +
			`},"output_tokens_details":{"reasoning_tokens":0}}`
		for _, stream := range []bool{false, true} {
			if got := usageOf(t, r, stream); got != want {
				t.Errorf("streamed %v: %s, want %s", stream, got, want)
			}
		}
	}
}

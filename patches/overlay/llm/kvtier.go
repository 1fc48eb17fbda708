package llm

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/ollama/ollama/kvtier"
)

// tierFlushTimeout bounds how long an unload waits for K/V that is not stored yet. The caller holds the scheduler's locks.
const tierFlushTimeout = 2 * time.Second

// tierFlush gives the runner the time to store what its slots hold, before it is killed.
func (s *llmServer) tierFlush() {
	if _, ok := kvtier.FromEnv(); !ok || s.cmd.ProcessState != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), tierFlushTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, fmt.Sprintf("http://127.0.0.1:%d/kvtier/flush", s.port), nil)
	if err != nil {
		return
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		slog.Debug("kv tiering: flush before unload", "error", err)
		return
	}
	response.Body.Close()
}

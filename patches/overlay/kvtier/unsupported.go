package kvtier

import (
	"log/slog"
	"os"
	"path/filepath"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// ReportUnsupported says, in the log and to the sidecar, that a model runs as in stock Ollama and why. Nothing happens
// when tiering is off.
func ReportUnsupported(modelPath, reason string) {
	config, ok := FromEnv()
	if !ok {
		return
	}
	slog.Warn("kv tiering is off for this model, it runs as in stock Ollama", "reason", reason)
	var client *Client
	ready := make(chan struct{})
	client, err := NewClient(config.Socket, func() {
		<-ready
		_ = client.Report(&tierpb.RunnerReport{Pid: int64(os.Getpid()), Model: filepath.Base(modelPath), Reason: reason})
	})
	if err != nil {
		slog.Warn("kv tiering is off", "error", err)
		return
	}
	close(ready)
}

package tiering

import (
	"os/exec"
	"strings"
	"testing"
)

func TestPanicTurnsTieringOffNotTheRunner(t *testing.T) {
	tier := fake(t, 1)
	tier.slots = nil // any access panics
	func() {
		defer Guard("discard")
		tier.BeforeDiscard(0, 0)
	}()
	if Active() != nil {
		t.Error("tiering is still on")
	}
	active.Store(tier)
	if got := tier.Restore(0, nil, 3, 5); got != 3 {
		t.Errorf("resumes at %d", got)
	}
	if Active() != nil {
		t.Error("tiering is still on")
	}
}

// What this package and the copying know: themselves, the client, its messages. No runner, no cache, no backend.
func TestPolicyKnowsNoRunner(t *testing.T) {
	const module = "github.com/ollama/ollama/"
	for from, allowed := range map[string][]string{
		".":       {"kvtier", "kvtier/rows", "kvtier/tiering", "kvtier/tierpb"},
		"../rows": {"kvtier/rows"},
	} {
		out, err := exec.Command("go", "list", "-deps", from).CombinedOutput()
		if err != nil {
			t.Fatalf("go list: %v: %s", err, out)
		}
		known := make(map[string]bool)
		for _, name := range allowed {
			known[module+name] = true
		}
		found := 0
		for _, name := range strings.Fields(string(out)) {
			if known[name] {
				found++
			} else if strings.HasPrefix(name, module) {
				t.Errorf("%s imports %s", from, name)
			}
		}
		if found != len(allowed) {
			t.Errorf("%s: %d of %v were listed", from, found, allowed)
		}
	}
}

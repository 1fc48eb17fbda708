package tiering

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
)

func TestARuleThatKeepsTheModelOutIsSaidOnce(t *testing.T) {
	var said bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&said, nil)))
	defer slog.SetDefault(before)
	tier := &Tiering{}
	for _, reason := range []string{"", "a rule", "a rule", "", "a rule"} {
		tier.sayRefused(reason)
	}
	if n := strings.Count(said.String(), "nothing of this model is stored"); n != 1 {
		t.Fatalf("said %d times:\n%s", n, said.String())
	}
	tier.sayRefused("another rule")
	if !strings.Contains(said.String(), "another rule") {
		t.Fatalf("not said:\n%s", said.String())
	}
}

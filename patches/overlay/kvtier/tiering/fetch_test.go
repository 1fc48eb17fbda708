package tiering

import (
	"context"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
)

func TestCollectGivesUpOnReadsThatHang(t *testing.T) {
	tier := &Tiering{}
	ctx, cancel := context.WithCancel(context.Background())
	files := newReaders[*fetchedBlock](tier, 3)
	files.n = 3
	opened := files.opened
	opened <- outcome[*fetchedBlock]{i: 1, block: &fetchedBlock{first: 64}}
	opened <- outcome[*fetchedBlock]{i: 0, err: kvtier.ErrCorrupt}
	go func() {
		for len(opened) > 0 {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	fetched, failed := files.collect(ctx)
	if failed[0] != kvtier.ErrCorrupt || failed[1] != nil || failed[2] != errLate || fetched[1].first != 64 {
		t.Fatalf("collected %v, %v", fetched, failed)
	}
	if tier.late.Load() != 1 {
		t.Fatal("a read that hangs is not known to")
	}
	if l := tier.prefetch(context.Background(), Text(tokensFrom(0, 200)), 200, nil); l.fetch != nil || l.short.reason != readHangs {
		t.Fatalf("fetched while a read hangs: %+v", l)
	}
	opened <- outcome[*fetchedBlock]{i: 2, block: &fetchedBlock{memory: &tier.memory}}
	for range 1000 {
		if tier.late.Load() == 0 {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("a read that came late is still thought to hang")
}

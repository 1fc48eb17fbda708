package tiering

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// BenchmarkLookUpToRows is the time from a prompt to its opened blocks, in the RAM tier of a running sidecar: nothing is copied
// into cells. Rows are small, so that it is the time of calls, plans and files.
func BenchmarkLookUpToRows(b *testing.B) {
	socket := os.Getenv("KVTIER_TEST_SOCKET")
	if socket == "" {
		b.Skip("KVTIER_TEST_SOCKET does not name the socket of a running sidecar")
	}
	for _, tokens := range []int{8192, 32768} {
		b.Run(fmt.Sprint(tokens), func(b *testing.B) {
			t := &testing.T{}
			tier := fake(t, 1)
			tier.model.Description = kvtier.Description{
				Model: "bench", Engine: "bench", CacheDType: "f16", Layers: tier.model.Layers, Extra: fmt.Sprint(tokens),
			}.Proto()
			tier.bind(newFakeRows(2*len(tier.model.Layers)), tier.model)
			client, err := kvtier.NewClient(socket, nil)
			if err != nil {
				b.Fatal(err)
			}
			defer client.Close()
			for tier.client = client; !client.Up(); time.Sleep(time.Millisecond) {
			}
			prompt := tokensFrom(0, tokens+1)
			tier.fillStore(b, prompt[:tokens])
			b.ResetTimer()
			for range b.N {
				l := tier.prefetch(b.Context(), Text(prompt), len(prompt), func() (int, int) { return 0, 0 })
				if l.fetch == nil || l.fetch.rows != tokens {
					b.Fatalf("not all came back: %+v", l.short)
				}
				l.close()
			}
		})
	}
}

// fillStore stores blocks of zeros.
func (t *Tiering) fillStore(b *testing.B, tokens []int32) {
	session, err := t.client.Put(t.putOpen(), time.Minute)
	if err != nil {
		b.Fatal(err)
	}
	defer session.Close()
	encoded, l := kvtier.TokenBytes(tokens), t.layout(kvtier.BlockTokens, nil)
	payload := make([]byte, l.Bytes)
	crcs := l.Checksums(payload)
	for first := 0; first < len(tokens); first += kvtier.BlockTokens {
		text := &tierpb.PutText{
			Tokens: encoded[:4*(first+kvtier.BlockTokens)], Blocks: []*tierpb.TextBlock{{FirstRow: uint32(first), Rows: kvtier.BlockTokens}},
		}
		reserved, err := session.Reserve(text)
		if err != nil {
			b.Fatal(err)
		}
		if r := reserved[0]; r.Outcome == tierpb.Reservation_OUTCOME_RESERVED {
			if err := kvtier.WriteFile(string(r.Path), int(r.FileBytes), int(r.PayloadOffset), payload); err != nil {
				b.Fatal(err)
			}
			if _, err := session.Commit([]uint64{r.Id}, [][]uint32{crcs}); err != nil {
				b.Fatal(err)
			}
		}
	}
}

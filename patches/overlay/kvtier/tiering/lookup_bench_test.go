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
	session, err := t.client.Put(t.namespace, t.model.Description, time.Minute)
	if err != nil {
		b.Fatal(err)
	}
	defer session.Close()
	encoded, parent := kvtier.TokenBytes(tokens), t.namespace
	for first := 0; first < len(tokens); first += kvtier.BlockTokens {
		l, part := t.layout(kvtier.BlockTokens, 0), encoded[4*first:4*(first+kvtier.BlockTokens)]
		key := kvtier.BlockKey(parent, part, nil)
		offer := &tierpb.BlockOffer{Key: key[:], Parent: parent[:], FileBytes: uint64(l.FileBytes)}
		reserved, err := session.Reserve([]*tierpb.BlockOffer{offer})
		if err != nil {
			b.Fatal(err)
		}
		if reserved[0].Outcome == tierpb.Reservation_OUTCOME_RESERVED {
			file := make([]byte, l.FileBytes)
			if err = l.Seal(file, t.namespace, key, parent, first, part, nil, t.model.DType); err == nil {
				err = kvtier.WriteFile(string(reserved[0].Path), file)
			}
			if err != nil {
				b.Fatal(err)
			}
			if _, err := session.Commit([]uint64{reserved[0].Id}); err != nil {
				b.Fatal(err)
			}
		}
		parent = key
	}
}

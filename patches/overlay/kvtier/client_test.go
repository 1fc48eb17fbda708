package kvtier

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// client returns a client of the running sidecar that KVTIER_TEST_SOCKET names.
func client(t *testing.T) *Client {
	t.Helper()
	socket := os.Getenv("KVTIER_TEST_SOCKET")
	if socket == "" {
		t.Skip("KVTIER_TEST_SOCKET does not name the socket of a running sidecar")
	}
	c, err := NewClient(socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	for deadline := time.Now().Add(10 * time.Second); !c.Up(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the sidecar on %s does not answer", socket)
		}
	}
	return c
}

// put stores the whole blocks and the tail of ids and returns the keys.
func put(t *testing.T, c *Client, d *tierpb.Namespace, ids []int32) (keys []Key) {
	t.Helper()
	ns := NamespaceOf(d)
	session, err := c.Put(&tierpb.PutOpen{
		Namespace: ns[:], Description: d, BlockTokens: BlockTokens, Segments: SegmentsOf(testLayers, "f16"),
	}, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	encoded, parent := TokenBytes(ids), Key(ns)
	text := &tierpb.PutText{Tokens: encoded}
	for first := 0; first < len(ids); first += BlockTokens {
		rows := min(BlockTokens, len(ids)-first)
		text.Blocks = append(text.Blocks, &tierpb.TextBlock{FirstRow: uint32(first), Rows: uint32(rows)})
		parent = BlockKey(parent, encoded[4*first:4*(first+rows)], nil, nil)
		keys = append(keys, parent)
	}
	reserved, err := session.Reserve(text)
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range reserved {
		if r.Outcome == tierpb.Reservation_OUTCOME_PRESENT {
			continue
		} else if r.Outcome != tierpb.Reservation_OUTCOME_RESERVED {
			t.Fatalf("reserve: %v", r)
		}
		first := int(text.Blocks[i].FirstRow)
		l := NewLayout(testLayers, int(text.Blocks[i].Rows))
		payload := bytes.Repeat([]byte{0xa5}, l.Bytes)
		for _, s := range l.Segments {
			copy(payload[s.Offset:s.Offset+s.Bytes], bytes.Repeat([]byte{byte(first), 7}, s.Bytes/2))
		}
		crcs := l.Checksums(payload)
		if err := WriteFile(string(r.Path), int(r.FileBytes), int(r.PayloadOffset), payload); err != nil {
			t.Fatal(err)
		}
		done, err := session.Commit([]uint64{r.Id}, [][]uint32{crcs})
		if err != nil || !done[0].Stored {
			t.Fatalf("commit: %v %v", done, err)
		}
	}
	return keys
}

func TestStoredBlocksAreMatchedToTheTokenAndReadBack(t *testing.T) {
	c := client(t)
	d := Description{Model: t.Name(), Engine: time.Now().String(), Layers: testLayers, CacheDType: "f16"}.Proto()
	ns := NamespaceOf(d)
	ids := make([]int32, 2*BlockTokens+10)
	for i := range ids {
		ids[i] = int32(i)
	}
	keys := put(t, c, d, ids)

	prompt := append([]int32{}, ids...)
	prompt[len(prompt)-3] = -1 // differs inside the tail
	seen, parents := 0, append([]Key{ns}, keys...)
	planned := func(plan *tierpb.LookUpPlan) time.Duration {
		if plan.EndRow != uint32(len(ids)-3) || plan.Files != 3 || plan.StartRow != 0 || plan.Reason != tierpb.Shortfall_SHORTFALL_DIFFERS {
			t.Errorf("planned %v", plan)
		}
		return time.Second
	}
	release, err := c.LookUp(context.Background(), wanted(ns, prompt), time.Second, planned, func(r *tierpb.NamedFile) error {
		open := ReadFile
		if r.Tier == tierpb.Tier_TIER_RAM {
			open = OpenFile
		}
		file, err := open(string(r.Path), int(r.FileBytes))
		if err != nil {
			return err
		}
		defer file.Close()
		b, err := file.Block()
		if err != nil {
			return err
		}
		rows := min(BlockTokens, len(ids)-seen*BlockTokens)
		if err := b.Matches(ns, keys[seen], parents[seen], seen*BlockTokens, rows, TokenBytes(ids[seen*BlockTokens:]), nil, testLayers, "f16"); err != nil {
			return err
		}
		segment := make([]byte, b.Header.Segments[1].StoredBytes)
		if file.Data != nil {
			copy(segment, b.Segment(1))
			err = b.Verify()
		} else {
			err = b.ReadSegment([][]byte{segment}, 1)
		}
		if got := segment[:2]; !bytes.Equal(got, []byte{byte(seen * BlockTokens), 7}) {
			t.Errorf("block %d starts with %v", seen, got)
		}
		seen++
		return err
	})
	release()
	if err != nil || seen != 3 {
		t.Fatalf("%d blocks, %v", seen, err)
	}
	seen = 0
	release, err = c.Get(context.Background(), ns, keys, time.Second, func(r *tierpb.GetResponse) error {
		if !bytes.Equal(r.Key, keys[seen][:]) || len(r.Path) == 0 {
			t.Errorf("block %d: %v", seen, r)
		}
		seen++
		return nil
	})
	if release(); err != nil || seen != 3 {
		t.Fatalf("%d blocks by their keys, %v", seen, err)
	}
}

// wanted asks for all of a prompt but its last token.
func wanted(ns Namespace, prompt []int32) *tierpb.LookUpRequest {
	return &tierpb.LookUpRequest{
		Namespace: ns[:], Tokens: TokenBytes(prompt), BlockTokens: BlockTokens, MostRows: uint32(max(len(prompt)-1, 0)), MinTokens: 1,
	}
}

// lookUp asks for a prompt of which nothing is expected.
func lookUp(ctx context.Context, c *Client, prompt []int32, timeout time.Duration) (plan *tierpb.LookUpPlan, err error) {
	_, err = c.LookUp(ctx, wanted(Namespace{9}, prompt), timeout, func(p *tierpb.LookUpPlan) time.Duration {
		plan = p
		return timeout
	}, func(*tierpb.NamedFile) error { return errors.New("a file of nothing") })
	return plan, err
}

func TestUnknownPromptIsAMissNotAnError(t *testing.T) {
	c := client(t)
	plan, err := lookUp(context.Background(), c, make([]int32, 200), time.Second)
	if err != nil || plan.Files != 0 || plan.EndRow != 0 || plan.Reason != tierpb.Shortfall_SHORTFALL_NOTHING_STORED {
		t.Errorf("%v, %v", plan, err)
	}
}

func TestAbsentSidecarCostsNoTime(t *testing.T) {
	c, err := NewClient(filepath.Join(t.TempDir(), "none.sock"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.WaitFirst()
	start := time.Now()
	for range 1000 {
		if _, err := lookUp(context.Background(), c, nil, LookupTimeout); !errors.Is(err, ErrDown) {
			t.Fatal(err)
		}
	}
	if took := time.Since(start); took > 20*time.Millisecond {
		t.Errorf("1000 calls took %v", took)
	}
}

func TestSilentSidecarCostsOneTimeout(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "hung.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			defer conn.Close() // accepted, never answered
		}
	}()
	c, err := NewClient(socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	start := time.Now()
	c.WaitFirst()
	if took := time.Since(start); took > LookupTimeout+50*time.Millisecond {
		t.Errorf("waiting for the first answer took %v", took)
	}
	c.up.Store(true) // as if it had become silent after it answered
	start = time.Now()
	for range 10 {
		_, _ = lookUp(context.Background(), c, nil, LookupTimeout)
	}
	if took := time.Since(start); took > LookupTimeout+50*time.Millisecond {
		t.Errorf("10 look-ups took %v in all", took)
	}
}

func TestReservationOfABrokenSessionIsReleased(t *testing.T) {
	c := client(t)
	d := Description{Model: t.Name(), Engine: time.Now().String(), Layers: testLayers}.Proto()
	ns := NamespaceOf(d)
	text := &tierpb.PutText{Tokens: TokenBytes(make([]int32, 3)), Blocks: []*tierpb.TextBlock{{Rows: 3}}}
	for i := range 2 {
		session, err := c.Put(&tierpb.PutOpen{
			Namespace: ns[:], Description: d, BlockTokens: BlockTokens, Segments: SegmentsOf(testLayers, "f16"),
		}, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		deadline := time.Now().Add(time.Second)
		for {
			r, err := session.Reserve(text)
			if err != nil {
				t.Fatal(err)
			}
			if r[0].Outcome == tierpb.Reservation_OUTCOME_RESERVED {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("session %d: %v", i, r[0].Outcome)
			}
			time.Sleep(10 * time.Millisecond)
		}
		session.Close() // without commit
	}
}

func TestSidecarThatFailsWhileItComesUpIsFoundAgain(t *testing.T) {
	client(t) // skips without a sidecar
	ups := make(chan struct{}, 10)
	var c *Client
	ready := make(chan struct{})
	first := true
	c, err := NewClient(os.Getenv("KVTIER_TEST_SOCKET"), func() {
		<-ready
		if first {
			first = false
			ctx, cancel := context.WithTimeout(context.Background(), time.Nanosecond)
			defer cancel()
			time.Sleep(time.Millisecond)
			_, _ = lookUp(ctx, c, nil, time.Second) // fails with the deadline
		}
		ups <- struct{}{}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	close(ready)
	for range 2 {
		select {
		case <-ups:
		case <-time.After(10 * time.Second):
			t.Fatal("nobody probes any more")
		}
	}
	if !c.Up() {
		t.Error("the sidecar answers, yet the client is down")
	}
}

package tiering

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/madeblock"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// sidecar stands in for the sidecar: it has the blocks of one prompt, and takes what is put.
type sidecar struct {
	tierpb.UnimplementedBlockStoreServer
	tier tierpb.Tier // what a look-up says
	read tierpb.Tier // where the blocks are found then
	dir  string

	seconds float64                                    // that a block is said to take
	has     func(context.Context) error                // what a look-up does before it answers, if it is not nil
	get     func(context.Context) error                // what a Get does before it answers to its last key, likewise
	content func() (*tierpb.CheckFilesResponse, error) // what it says of the model's files, if it is not nil
	gone    bool                                       // there is no block of that key any more

	fingerprint []byte // of every block, as it says
	older       bool   // it does not know of those
	socket      string

	attached map[kvtier.Key][]*tierpb.AttachedBlock // window blocks, by the block that they hang on

	mu      sync.Mutex
	blocks  []sidecarBlock
	asked   int      // keys of the last Get
	damaged [][]byte // keys that were reported
	put     []string // files that were reserved
	wrong   int      // bytes that it says they have and have not
	reports []*tierpb.RunnerReport
}

type sidecarBlock struct {
	key  kvtier.Key
	rows int
	path string
	size int
}

// withSidecar returns a runner's tiering whose sidecar has the first tokens of every prompt of tokensFrom, in files of the
// given tier.
func withSidecar(t *testing.T, slots, tokens int, where tierpb.Tier) (*Tiering, *sidecar) {
	t.Helper()
	tier := fake(t, slots)
	tier.stats.prefillRate = 1 // a look-up may take its time, however busy the machine is
	s := &sidecar{tier: where, read: where, dir: t.TempDir(), seconds: 0.001}
	s.store(t, tier, tokens)
	dir, err := os.MkdirTemp("", "kv") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	listener, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	s.socket = listener.Addr().String()
	server := grpc.NewServer()
	tierpb.RegisterBlockStoreServer(server, s)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	client, err := kvtier.NewClient(listener.Addr().String(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	for deadline := time.Now().Add(10 * time.Second); !client.Up(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the stand-in does not answer")
		}
	}
	tier.client = client
	return tier, s
}

// withSidecarOnly is withSidecar for a single slot and blocks in the RAM tier.
func withSidecarOnly(t *testing.T, tokens int) *Tiering {
	tier, _ := withSidecar(t, 1, tokens, tierpb.Tier_TIER_RAM)
	return tier
}

// storedByte is every byte of a position's row in a segment.
func storedByte(position, segment int) byte { return byte(3*position + 50*segment) }

// store writes block files for the first tokens of tokensFrom.
func (s *sidecar) store(t *testing.T, tier *Tiering, tokens int) {
	t.Helper()
	encoded, parent := kvtier.TokenBytes(tokensFrom(0, tokens)), tier.namespace
	for first := 0; first < tokens; first += kvtier.BlockTokens {
		rows := min(kvtier.BlockTokens, tokens-first)
		part := encoded[4*first : 4*(first+rows)]
		key := kvtier.BlockKey(parent, part, nil, nil)
		h := &tierpb.BlockHeader{
			Namespace: tier.namespace[:], Key: key[:], Parent: parent[:], FirstPosition: uint32(first), Tokens: part,
			Segments: kvtier.SegmentsOf(tier.model.Layers, tier.model.DType),
		}
		payload := madeblock.Payload(h, func(segment, at int) byte {
			return storedByte(first+at/int(h.Segments[segment].RowBytes), segment)
		})
		file := madeblock.File(h, payload)
		path := filepath.Join(s.dir, fmt.Sprint(first))
		if err := os.WriteFile(path, file, 0o600); err != nil {
			t.Fatal(err)
		}
		s.blocks = append(s.blocks, sidecarBlock{key, rows, path, len(file)})
		parent = key
	}
}

// change alters one byte of a row in a block's file, in place: also a mapping of the file sees it.
func (s *sidecar) change(t *testing.T, tier *Tiering, block, row, segment int) {
	t.Helper()
	fd, err := os.OpenFile(s.blocks[block].path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	l := tier.layout(s.blocks[block].rows, nil)
	at := int64(s.blocks[block].size - l.Bytes + l.Segments[segment].Offset + row*l.Segments[segment].RowBytes)
	if _, err := fd.WriteAt([]byte{storedByte(64*block+row, segment) ^ 1}, at); err != nil {
		t.Fatal(err)
	}
}

func (s *sidecar) Stat(context.Context, *tierpb.StatRequest) (*tierpb.StatForEngines, error) {
	return &tierpb.StatForEngines{Tiers: []*tierpb.TierFolder{{Directory: []byte(s.dir)}}, LookUp: !s.older, PutText: !s.older}, nil
}

// CheckFiles says what content does, or that all is sound.
func (s *sidecar) CheckFiles(context.Context, *tierpb.CheckFilesRequest) (*tierpb.CheckFilesResponse, error) {
	if s.content != nil {
		return s.content()
	}
	return &tierpb.CheckFilesResponse{State: tierpb.CheckFilesResponse_STATE_SOUND}, nil
}

// LookUp answers what the real one would of a prompt that has no images, whose rules have tests of their own.
func (s *sidecar) LookUp(r *tierpb.LookUpRequest, stream tierpb.BlockStore_LookUpServer) error {
	if s.has != nil {
		if err := s.has(stream.Context()); err != nil {
			return err
		}
	}
	plan, blocks, windows := s.plan(r)
	var files []*tierpb.NamedFile
	for _, b := range blocks {
		files = append(files, s.named(b, s.fingerprint))
		if s.tier != tierpb.Tier_TIER_RAM {
			plan.OwnBytes += uint64(b.size)
		}
	}
	for _, key := range windows {
		if i := slices.IndexFunc(s.blocks, func(b sidecarBlock) bool { return b.key == key }); i >= 0 {
			files = append(files, s.named(s.blocks[i], nil))
		}
	}
	plan.Files = uint32(len(blocks) + len(windows))
	if err := stream.Send(&tierpb.LookUpResponse{Plan: plan}); err != nil {
		return err
	}
	for i, file := range files {
		s.mu.Lock()
		s.asked = i + 1
		s.mu.Unlock()
		if i == len(files)-1 && s.get != nil {
			if err := s.get(stream.Context()); err != nil {
				return err
			}
		}
		if i == len(files)-1 && s.gone {
			return nil
		}
		if err := stream.Send(&tierpb.LookUpResponse{Files: []*tierpb.NamedFile{file}, LeaseId: 1}); err != nil {
			return err
		}
	}
	return nil
}

func (s *sidecar) named(b sidecarBlock, fingerprint []byte) *tierpb.NamedFile {
	return &tierpb.NamedFile{Key: b.key[:], Tier: s.read, Path: []byte(b.path), FileBytes: uint64(b.size), Fingerprint: fingerprint}
}

// plan is what the prompt has in common with the stored tokens, from the first block on that the slot does not hold, and the last
// blocks of the windows that go with it.
func (s *sidecar) plan(r *tierpb.LookUpRequest) (plan *tierpb.LookUpPlan, blocks []sidecarBlock, windows []kvtier.Key) {
	rows, differs := 0, false
	for _, b := range s.chain() {
		same := 0
		for same < b.rows && 4*(rows+same) < len(r.Tokens) && binary.LittleEndian.Uint32(r.Tokens[4*(rows+same):]) == uint32(rows+same) {
			same++
		}
		rows, differs = rows+same, same < b.rows
		if differs {
			differs = same > 0
			break
		}
	}
	end := min(rows, int(r.MostRows))
	for _, span := range slices.Backward(r.Spans) {
		if int(span.First) < end && end <= int(span.Last) {
			end = int(span.First)
		}
	}
	plan = &tierpb.LookUpPlan{AtRow: uint32(end)}
	switch {
	case end == int(r.MostRows):
		plan.AtRow = 0
	case end == 0:
		plan.Reason = nothingStored
	case differs:
		plan.Reason = storedDiffers
	default:
		plan.Reason = storedEnds
	}
	least := int(r.MemoryRows + r.MinTokens)
	if end < least {
		return plan, nil, nil
	}
	if len(r.Windows) > 0 {
		matched := end
		if end, windows = s.windowsUpTo(r, end, least); end < matched {
			if plan.Reason, plan.AtRow = windowMissing, uint32(matched); r.Windows[0].AtCheckpoints {
				plan.Reason, plan.AtRow = stateMissing, uint32(end)
			}
		}
		if end == 0 {
			return plan, nil, nil
		}
	}
	if r.PrefillTokensPerSecond > 0 && s.seconds > float64(end)/r.PrefillTokensPerSecond {
		return &tierpb.LookUpPlan{Reason: gateSaysNo}, nil, nil
	}
	start := int(r.MemoryRows) / kvtier.BlockTokens
	if r.ByRows && (start > len(r.Fingerprints) || slices.ContainsFunc(r.Fingerprints[:start], func(of []byte) bool {
		return !bytes.Equal(of, s.fingerprint)
	})) {
		start = 0
	}
	for first := start * kvtier.BlockTokens; first < end; first += kvtier.BlockTokens {
		blocks = append(blocks, s.chain()[first/kvtier.BlockTokens])
	}
	plan.StartRow, plan.EndRow = uint32(start*kvtier.BlockTokens), uint32(end)
	plan.ExpectedSeconds = s.seconds * float64(len(blocks))
	return plan, blocks, windows
}

// chain are the blocks that no window has.
func (s *sidecar) chain() (of []sidecarBlock) {
	for _, b := range s.blocks {
		if b.rows > 0 {
			of = append(of, b)
		}
	}
	return of
}

// windowsUpTo is the last position at which all windows are stored, with their last blocks; 0: there is none from least on.
func (s *sidecar) windowsUpTo(r *tierpb.LookUpRequest, end, least int) (at int, keys []kvtier.Key) {
	for at = end; at >= least; at-- {
		keys = nil
		on := (at - 1) / kvtier.BlockTokens
		for _, w := range r.Windows {
			first := max(0, at-int(w.Size), on*kvtier.BlockTokens)
			key := kvtier.WindowBlock{
				On: s.chain()[on].key, Child: int(w.Child), First: first % kvtier.BlockTokens, Tokens: r.Tokens[4*first : 4*at], Last: true,
			}.Key()
			if slices.ContainsFunc(s.attached[s.chain()[on].key], func(a *tierpb.AttachedBlock) bool { return bytes.Equal(a.Key, key[:]) }) {
				keys = append(keys, key)
			}
		}
		if len(keys) == len(r.Windows) {
			return at, keys
		}
	}
	return 0, nil
}

func (s *sidecar) Get(r *tierpb.GetRequest, stream tierpb.BlockStore_GetServer) error {
	s.mu.Lock()
	s.asked = len(r.Keys)
	s.mu.Unlock()
	for n, key := range r.Keys {
		if n == len(r.Keys)-1 {
			if s.get != nil {
				if err := s.get(stream.Context()); err != nil {
					return err
				}
			}
			if s.gone {
				return stream.Send(&tierpb.GetResponse{Key: key, LeaseId: 1})
			}
		}
		i := slices.IndexFunc(s.blocks, func(b sidecarBlock) bool { return string(b.key[:]) == string(key) })
		if i < 0 {
			return stream.Send(&tierpb.GetResponse{Key: key, LeaseId: 1})
		}
		answer := &tierpb.GetResponse{
			Key: key, LeaseId: 1, Found: true, Tier: s.read, Path: []byte(s.blocks[i].path), FileBytes: uint64(s.blocks[i].size),
		}
		if err := stream.Send(answer); err != nil {
			return err
		}
	}
	return nil
}

func (s *sidecar) Release(context.Context, *tierpb.ReleaseRequest) (*tierpb.ReleaseResponse, error) {
	return &tierpb.ReleaseResponse{}, nil
}

func (s *sidecar) ReportCorrupt(_ context.Context, r *tierpb.ReportCorruptRequest) (*tierpb.ReportCorruptResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.damaged = append(s.damaged, r.Key)
	return &tierpb.ReportCorruptResponse{}, nil
}

func (s *sidecar) ReportRunner(_ context.Context, r *tierpb.RunnerReport) (*tierpb.ReportRunnerResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reports = append(s.reports, r)
	return &tierpb.ReportRunnerResponse{}, nil
}

// reported waits for a report that is as asked for.
func (s *sidecar) reported(t *testing.T, what string, wanted func(*tierpb.RunnerReport) bool) *tierpb.RunnerReport {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		s.mu.Lock()
		i := slices.IndexFunc(s.reports, wanted)
		if i >= 0 {
			defer s.mu.Unlock()
			return s.reports[i]
		}
		s.mu.Unlock()
		if time.Now().After(deadline) {
			t.Fatalf("no report: %s", what)
		}
	}
}

// Put reserves whatever is offered and takes it.
func (s *sidecar) Put(stream tierpb.BlockStore_PutServer) error {
	var segments []*tierpb.Segment
	for {
		r, err := stream.Recv()
		if err != nil {
			return nil
		}
		answer := &tierpb.PutResponse{}
		switch {
		case r.GetOpen() != nil:
			segments = r.GetOpen().Segments
			continue
		case r.GetReserve() != nil:
			reserved := &tierpb.PutReserved{}
			for _, rows := range r.GetReserve().GetText().Blocks {
				s.mu.Lock()
				path, size := filepath.Join(s.dir, fmt.Sprintf("put-%d.tmp", len(s.put))), 4096
				s.put = append(s.put, path)
				s.mu.Unlock()
				for _, segment := range segments {
					size += (int(segment.RowBytes*rows.Rows) + 4095) / 4096 * 4096
				}
				if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
					return err
				}
				reserved.Reservations = append(reserved.Reservations, &tierpb.Reservation{
					Outcome: tierpb.Reservation_OUTCOME_RESERVED, Id: uint64(len(reserved.Reservations)), Path: []byte(path),
					PayloadOffset: 4096, FileBytes: uint64(size + s.wrong),
				})
			}
			answer.Result = &tierpb.PutResponse_Reserved{Reserved: reserved}
		case r.GetCommit() != nil:
			committed := &tierpb.PutCommitted{}
			for range r.GetCommit().ReservationIds {
				committed.Results = append(committed.Results, &tierpb.Committed{Stored: true})
			}
			answer.Result = &tierpb.PutResponse_Committed{Committed: committed}
		default:
			continue
		}
		if err := stream.Send(answer); err != nil {
			return err
		}
	}
}

// wasReported waits until a block is reported as damaged.
func (s *sidecar) wasReported(t *testing.T, block int) {
	t.Helper()
	key := s.blocks[block].key
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		s.mu.Lock()
		found := slices.ContainsFunc(s.damaged, func(k []byte) bool { return string(k) == string(key[:]) })
		s.mu.Unlock()
		if found {
			return
		}
	}
	t.Errorf("the sidecar was not told that block %d is damaged", block)
}

// prefetchFor does what a request does before it has a slot: the first one holds its first tokens, or nothing.
func (t *Tiering) prefetchFor(ctx context.Context, prompt []int32) *fetch {
	t.Prefetch(ctx, &prompt[0], Text(prompt), len(prompt), t.held0)
	t.lookUps.mu.Lock()
	defer t.lookUps.mu.Unlock()
	return t.lookUps.of[&prompt[0]].fetch
}

// held0 is the first slot, and how many rows it holds from the first position on.
func (t *Tiering) held0() (slot, n int) {
	t.host.Lock()
	defer t.host.Unlock()
	for t.rows.Cells(0, n, n+1) != nil {
		n++
	}
	return 0, n
}

// restoreFor does what a request does when it gets a slot that holds its first tokens.
func (t *Tiering) restoreFor(slot int, prompt []int32, memory int) int {
	t.host.Lock()
	defer t.host.Unlock()
	return t.Restore(slot, &prompt[0], memory, len(prompt))
}

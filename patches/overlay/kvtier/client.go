package kvtier

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// ErrDown says that the sidecar is known not to answer; it costs no time.
var ErrDown = errors.New("sidecar is down")

const (
	// LookupTimeout bounds what a silent sidecar adds to the one request that finds it silent; a caller with much to
	// gain may allow more.
	LookupTimeout = 80 * time.Millisecond

	probeTimeout = time.Second
	probeMin     = 200 * time.Millisecond
	probeMax     = 5 * time.Second
)

// Client talks to the sidecar. After a call fails, all calls return ErrDown at once until a background probe has had an
// answer, so that a dead or hung sidecar costs one timeout in all. Safe for concurrent use.
type Client struct {
	conn     *grpc.ClientConn
	rpc      tierpb.BlockStoreClient
	up       atomic.Bool
	probing  atomic.Bool
	failures atomic.Uint64
	folders  atomic.Pointer[[]string] // of the sidecar's tiers
	speaks   atomic.Bool
	onUp     func()
	first    chan struct{} // closed when the first probe has ended
	once     sync.Once
	done     chan struct{}
}

// NewClient returns a client of the sidecar on a Unix socket, if this user's or root's program listens there. It starts down
// and connects in the background; onUp runs each time the sidecar comes (back) up.
func NewClient(socket string, onUp func()) (*Client, error) {
	conn, err := grpc.NewClient(target,
		grpc.WithContextDialer(dialer(socket)),
		grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		}),
	)
	if err != nil {
		return nil, err
	}
	c := &Client{conn: conn, rpc: tierpb.NewBlockStoreClient(conn), onUp: onUp, first: make(chan struct{}), done: make(chan struct{})}
	c.probe()
	return c, nil
}

// Close ends the connection and the probing.
func (c *Client) Close() {
	close(c.done)
	c.conn.Close()
}

// WaitFirst waits until the first probe has ended, at most for LookupTimeout: a request that follows the loading of a model
// at once finds the sidecar up if it is.
func (c *Client) WaitFirst() {
	select {
	case <-c.first:
	case <-time.After(LookupTimeout):
	}
}

// Up reports whether the sidecar answered last.
func (c *Client) Up() bool { return c.up.Load() }

// Speaks reports whether the sidecar that answered last knows all that is asked here; one of an older program does not.
func (c *Client) Speaks() bool { return c.speaks.Load() }

// Failures counts calls that failed for another reason than ErrDown.
func (c *Client) Failures() uint64 { return c.failures.Load() }

// LookUp asks what of a prompt is worth restoring, and for its files. The plan comes within timeout, and is given to planned, which
// says how long the files may take from then on; then each is called for every file, in order. It ends without an error where the
// sidecar has lost a file. The lease lasts until the returned function is called. Where the time for the files is over and each
// took most of it, that is not the sidecar's failure.
func (c *Client) LookUp(
	ctx context.Context, request *tierpb.LookUpRequest, timeout time.Duration,
	planned func(*tierpb.LookUpPlan) time.Duration, each func(*tierpb.NamedFile) error,
) (release func(), err error) {
	release = func() {}
	if !c.up.Load() {
		return release, ErrDown
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	late := time.AfterFunc(timeout, func() { cancel(context.DeadlineExceeded) })
	defer late.Stop()
	stream, err := c.rpc.LookUp(ctx, request)
	if err != nil {
		return release, c.result(ctx, err)
	}
	var own time.Duration
	for plan := (*tierpb.LookUpPlan)(nil); ; {
		answer, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) && plan != nil:
			return release, nil
		case err != nil && plan != nil && own > timeout/2 && errors.Is(context.Cause(ctx), context.DeadlineExceeded):
			return release, context.DeadlineExceeded
		case err != nil:
			return release, c.result(ctx, err)
		}
		if plan == nil {
			if plan = answer.Plan; plan == nil {
				return release, errors.New("sidecar answered files without a plan")
			}
			late.Stop()
			timeout = planned(plan)
			late.Reset(timeout)
		}
		if lease := answer.LeaseId; lease != 0 {
			release = func() { go c.release(lease) }
		}
		for _, file := range answer.Files {
			start := time.Now()
			if err := each(file); err != nil {
				return release, err
			}
			own += time.Since(start)
		}
	}
}

// Get leases blocks and calls each for every one that was found, in order, with the file that holds it. It stops at the
// first that is not found. The lease lasts until the returned function is called. Where the time is over and each took
// most of it, that is not the sidecar's failure.
func (c *Client) Get(ctx context.Context, ns Namespace, keys []Key, timeout time.Duration, each func(*tierpb.GetResponse) error) (release func(), err error) {
	release = func() {}
	ctx, cancel, err := c.start(ctx, timeout)
	if err != nil {
		return release, err
	}
	defer cancel()
	stream, err := c.rpc.Get(ctx, &tierpb.GetRequest{Namespace: ns[:], Keys: keyBytes(keys), Batch: true})
	if err != nil {
		return release, c.result(ctx, err)
	}
	var lease uint64
	release = func() {
		if lease != 0 {
			go c.release(lease)
		}
	}
	var own time.Duration
	for left := len(keys); ; {
		batch, err := stream.Recv()
		if left <= 0 {
			return release, nil // the end of the stream: the call is complete and its lease stays until it is released
		}
		// The status, not ctx: the sidecar's clock may be first.
		if status.Code(err) == codes.DeadlineExceeded && own > timeout/2 {
			return release, err
		}
		if err != nil {
			return release, c.result(ctx, err)
		}
		for _, response := range append([]*tierpb.GetResponse{batch}, batch.More...) {
			lease = response.LeaseId
			if left == 0 || !response.Found {
				return release, nil
			}
			left--
			start := time.Now()
			if err := each(response); err != nil {
				return release, err
			}
			own += time.Since(start)
		}
	}
}

func (c *Client) release(lease uint64) {
	if ctx, cancel, err := c.start(context.Background(), probeTimeout); err == nil {
		defer cancel()
		_, err := c.rpc.Release(ctx, &tierpb.ReleaseRequest{LeaseId: lease})
		_ = c.result(ctx, err)
	}
}

// ReportCorrupt tells the sidecar that a block's bytes were not what its header says.
func (c *Client) ReportCorrupt(ns Namespace, key Key, detail string) error {
	ctx, cancel, err := c.start(context.Background(), 10*time.Second)
	if err != nil {
		return err
	}
	defer cancel()
	_, err = c.rpc.ReportCorrupt(ctx, &tierpb.ReportCorruptRequest{Namespace: ns[:], Key: key[:], Detail: detail})
	return c.result(ctx, err)
}

// Report tells the sidecar about this runner.
func (c *Client) Report(r *tierpb.RunnerReport) error {
	ctx, cancel, err := c.start(context.Background(), probeTimeout)
	if err != nil {
		return err
	}
	defer cancel()
	_, err = c.rpc.ReportRunner(ctx, r)
	return c.result(ctx, err)
}

// PutSession is a writer session: what it reserved and did not commit is released when it is closed.
type PutSession struct {
	c      *Client
	stream tierpb.BlockStore_PutClient
	ctx    context.Context
	cancel context.CancelFunc
}

// Put opens a writer session that must end within timeout.
func (c *Client) Put(open *tierpb.PutOpen, timeout time.Duration) (*PutSession, error) {
	ctx, cancel, err := c.start(context.Background(), timeout)
	if err != nil {
		return nil, err
	}
	stream, err := c.rpc.Put(ctx)
	if err == nil {
		err = stream.Send(&tierpb.PutRequest{Op: &tierpb.PutRequest_Open{Open: open}})
	}
	if err != nil {
		cancel()
		return nil, c.result(ctx, err)
	}
	return &PutSession{c: c, stream: stream, ctx: ctx, cancel: cancel}, nil
}

// Reserve asks for files of the blocks of a text; the answers are in their order.
func (p *PutSession) Reserve(text *tierpb.PutText) ([]*tierpb.Reservation, error) {
	response, err := p.call(&tierpb.PutRequest{Op: &tierpb.PutRequest_Reserve{Reserve: &tierpb.PutReserve{Text: text}}})
	if err != nil {
		return nil, err
	}
	if got := response.GetReserved().GetReservations(); len(got) == len(text.Blocks) {
		return got, p.c.checkReserved(p.ctx, got)
	}
	return nil, errors.New("sidecar answered another number of reservations")
}

// Commit makes filled files visible; the answers are in the order of the ids. crcs are the checksums of the segments of each.
func (p *PutSession) Commit(ids []uint64, crcs [][]uint32) ([]*tierpb.Committed, error) {
	commit := &tierpb.PutCommit{ReservationIds: ids}
	for _, of := range crcs {
		commit.Crcs = append(commit.Crcs, crcBytes(of))
	}
	response, err := p.call(&tierpb.PutRequest{Op: &tierpb.PutRequest_Commit{Commit: commit}})
	if err != nil {
		return nil, err
	}
	if got := response.GetCommitted().GetResults(); len(got) == len(ids) {
		return got, nil
	}
	return nil, errors.New("sidecar answered another number of commits")
}

// Close ends the session.
func (p *PutSession) Close() {
	_ = p.stream.CloseSend()
	p.cancel()
}

func (p *PutSession) call(request *tierpb.PutRequest) (*tierpb.PutResponse, error) {
	if err := p.stream.Send(request); err != nil {
		// the stream's own error is what Recv returns
		if _, recvErr := p.stream.Recv(); recvErr != nil {
			err = recvErr
		}
		return nil, p.c.result(p.ctx, err)
	}
	response, err := p.stream.Recv()
	return response, p.c.result(p.ctx, err)
}

func (c *Client) start(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc, error) {
	if !c.up.Load() {
		return nil, nil, ErrDown
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	return ctx, cancel, nil
}

// result counts a failed call and takes the client down if the failure is the sidecar's. A caller that went away and an
// answer that says no (bad argument, no room) leave it up.
func (c *Client) result(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		if !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
			return err
		}
		err = context.DeadlineExceeded // of a time that depends on what was answered first
	}
	c.failures.Add(1)
	switch status.Code(err) { // Unknown for what is no status, such as the end of the time
	case codes.InvalidArgument, codes.ResourceExhausted, codes.DataLoss, codes.NotFound:
	default:
		if c.up.CompareAndSwap(true, false) {
			slog.Warn("kv tiering paused, going on without it", "error", err)
		}
		c.probe()
	}
	return err
}

// probe asks the sidecar in the background until it answers.
func (c *Client) probe() {
	if !c.probing.CompareAndSwap(false, true) {
		return
	}
	go func() {
		for wait := probeMin; ; wait = min(wait*2, probeMax) {
			ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
			stat, err := c.rpc.Stat(ctx, &tierpb.StatRequest{})
			cancel()
			if err == nil {
				c.noteFolders(stat)
				c.speaks.Store(stat.LookUp && stat.PutText)
				c.probing.Store(false) // before up: a call that fails from now on, even in onUp, starts the next probe
				c.up.Store(true)
			}
			c.once.Do(func() { close(c.first) })
			if err == nil {
				slog.Info("kv tiering: sidecar is up")
				if c.onUp != nil {
					c.onUp()
				}
				return
			}
			select {
			case <-c.done:
				c.probing.Store(false)
				return
			case <-time.After(wait):
			}
		}
	}()
}

func keyBytes(keys []Key) [][]byte {
	out := make([][]byte, len(keys))
	for i := range keys {
		out[i] = keys[i][:]
	}
	return out
}

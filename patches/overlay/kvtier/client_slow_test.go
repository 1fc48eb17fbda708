package kvtier

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// oneBlockSidecar names the first block of every Get, and never the second.
type oneBlockSidecar struct {
	tierpb.UnimplementedBlockStoreServer
}

func (oneBlockSidecar) Stat(context.Context, *tierpb.StatRequest) (*tierpb.StatForEngines, error) {
	return &tierpb.StatForEngines{}, nil
}

func (oneBlockSidecar) Get(request *tierpb.GetRequest, stream tierpb.BlockStore_GetServer) error {
	if err := stream.Send(&tierpb.GetResponse{Key: request.Keys[0], Found: true}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

func TestACallersOwnTimeIsNotTheSidecarsFailure(t *testing.T) {
	dir, err := os.MkdirTemp("", "kv") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	tierpb.RegisterBlockStoreServer(server, oneBlockSidecar{})
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()
	c, err := NewClient(socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for deadline := time.Now().Add(10 * time.Second); !c.Up(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the sidecar does not answer")
		}
	}
	const timeout = time.Second
	for _, test := range []struct {
		own      time.Duration
		failures uint64
	}{{timeout * 8 / 10, 0}, {0, 1}} {
		before, blocks := c.Failures(), 0
		release, err := c.Get(context.Background(), Namespace{}, []Key{{1}, {2}}, timeout, func(*tierpb.GetResponse) error {
			blocks++
			time.Sleep(test.own)
			return nil
		})
		release()
		if err == nil || blocks != 1 {
			t.Fatalf("%d blocks of one, error %v", blocks, err)
		}
		if got := c.Failures() - before; got != test.failures {
			t.Errorf("the caller took %v of %v: %d failures are counted, want %d", test.own, timeout, got, test.failures)
		}
	}
}

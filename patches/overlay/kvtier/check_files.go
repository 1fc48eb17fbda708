package kvtier

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// CheckFiles asks whether files are what they were when they were loaded, and what their names say. A sidecar that can't tell
// is as if it refused.
func (c *Client) CheckFiles(files []LoadedFile) (*tierpb.CheckFilesResponse, error) {
	request := &tierpb.CheckFilesRequest{}
	for _, f := range files {
		request.Files = append(request.Files, &tierpb.LoadedFile{
			Path: []byte(f.Path), Device: f.Device, Inode: f.Inode, SizeBytes: f.Size, MtimeNs: f.Mtime, CtimeNs: f.Ctime,
		})
	}
	ctx, cancel, err := c.start(context.Background(), probeTimeout)
	if err != nil {
		return nil, err
	}
	defer cancel()
	response, err := c.rpc.CheckFiles(ctx, request)
	if status.Code(err) == codes.Unimplemented {
		return &tierpb.CheckFilesResponse{
			State:  tierpb.CheckFilesResponse_STATE_REFUSED,
			Reason: "the sidecar is older than this Ollama and can't check the model's file: start it again",
		}, nil
	}
	return response, c.result(ctx, err)
}

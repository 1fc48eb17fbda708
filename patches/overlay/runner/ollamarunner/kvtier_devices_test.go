package ollamarunner

import (
	"strings"
	"testing"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/ml"
)

type tierFakeDevices struct {
	devices []ml.DeviceInfo
	libc    string
	engine  string
	iq4nl   bool
}

func (f tierFakeDevices) BackendDevices() []ml.DeviceInfo { return f.devices }
func (tierFakeDevices) KVTierSync()                       {}
func (tierFakeDevices) KVTierCPU() string                 { return "AVX2,FMA" }
func (f tierFakeDevices) KVTierLibc() string              { return f.libc }
func (f tierFakeDevices) KVTierLibraries() string         { return "" }
func (tierFakeDevices) KVTierPinned(int) []byte           { return nil }
func (f tierFakeDevices) KVPagedEngine() string           { return f.engine }
func (f tierFakeDevices) ExactAttnAnyCut() bool           { return !f.iq4nl }
func (tierFakeDevices) ExactAttnRefused() int             { return 0 }

func (tierFakeDevices) ExactAttnReads([]ml.Tensor) func(ml.Context) string {
	return func(ml.Context) string { return "" }
}

func tierCard(id, description string, driver int) ml.DeviceInfo {
	return ml.DeviceInfo{
		DeviceID: ml.DeviceID{ID: id, Library: "CUDA"}, Description: description, ComputeMajor: 8, ComputeMinor: 6,
		DriverMajor: driver, LibraryPath: []string{"/opt/lib/ollama", "/opt/lib/ollama/cuda_v12"},
	}
}

func tierLayersOn(id string, layers ...int) ml.GPULayers {
	return ml.GPULayers{DeviceID: ml.DeviceID{ID: id, Library: "CUDA"}, Layers: layers}
}

func TestTierWhatComputesTheModelIsInTheNamespace(t *testing.T) {
	layers := []kvtier.Layer{{Layer: 0}, {Layer: 1}, {Layer: 2}, {Layer: 3}}
	one, other := tierCard("GPU-a", "RTX 3090", 12), tierCard("GPU-b", "RTX 3060", 12)
	both := []ml.DeviceInfo{one, other}
	say := func(devices []ml.DeviceInfo, hosts string, assigned ...ml.GPULayers) string {
		return tierComputing(tierFakeDevices{devices: devices, libc: "2.36"}, hosts, layers, assigned)
	}
	if got := say(nil, "hhhh"); got != "devices=none;cpu=AVX2,FMA;libc=2.36;rows=hhhh" {
		t.Error(got)
	}
	// each differs from all others
	seen := map[string]int{}
	for i, said := range []string{
		say(nil, "hhhh"),
		say([]ml.DeviceInfo{one}, "dddd", tierLayersOn("GPU-a", 0, 1, 2, 3)),
		say([]ml.DeviceInfo{one}, "hddd", tierLayersOn("GPU-a", 1, 2, 3)),
		say([]ml.DeviceInfo{other}, "dddd", tierLayersOn("GPU-b", 0, 1, 2, 3)),
		say([]ml.DeviceInfo{tierCard("GPU-a", "RTX 3090", 13)}, "dddd", tierLayersOn("GPU-a", 0, 1, 2, 3)),
		say(both, "dddd", tierLayersOn("GPU-a", 0, 1), tierLayersOn("GPU-b", 2, 3)),
		say(both, "dddd", tierLayersOn("GPU-a", 0, 1, 2), tierLayersOn("GPU-b", 3)),
		say(both, "dddd", tierLayersOn("GPU-b", 0, 1), tierLayersOn("GPU-a", 2, 3)),
		tierComputing(tierFakeDevices{devices: nil, libc: "2.40"}, "hhhh", layers, nil),
		tierComputing(tierFakeDevices{devices: []ml.DeviceInfo{one}, libc: "2.36", engine: "exact.1"}, "dddd", layers,
			[]ml.GPULayers{tierLayersOn("GPU-a", 0, 1, 2, 3)}),
		tierComputing(tierFakeDevices{devices: []ml.DeviceInfo{one}, libc: "2.36", engine: "exact.2"}, "dddd", layers,
			[]ml.GPULayers{tierLayersOn("GPU-a", 0, 1, 2, 3)}),
	} {
		if first, ok := seen[said]; ok {
			t.Errorf("%d says what %d says: %s", i, first, said)
		}
		seen[said] = i
	}
	if got := say(both, "hddd", tierLayersOn("GPU-b", 1), tierLayersOn("GPU-a", 2, 3)); !strings.HasSuffix(got, ";rows=h011") {
		t.Errorf("the 3060 is the first by name: %s", got)
	}
	// the order in which cards are found does not count, nor which of two alike holds a layer
	twin := tierCard("GPU-c", "RTX 3090", 12)
	if a, b := say(both, "dddd", tierLayersOn("GPU-a", 0, 1, 2, 3)), say([]ml.DeviceInfo{other, one}, "dddd", tierLayersOn("GPU-a", 0, 1, 2, 3)); a != b {
		t.Errorf("%s and %s", a, b)
	}
	twins := []ml.DeviceInfo{one, twin}
	if a, b := say(twins, "dddd", tierLayersOn("GPU-a", 0, 1), tierLayersOn("GPU-c", 2, 3)), say(twins, "dddd", tierLayersOn("GPU-c", 0, 1, 2, 3)); a != b {
		t.Errorf("%s and %s", a, b)
	}
	if got := say(both, "dddd", tierLayersOn("GPU-x", 0, 1, 2, 3)); !strings.HasSuffix(got, ";rows=dddd") {
		t.Errorf("a card that is not listed: %s", got)
	}
}

package ollamarunner

import (
	"slices"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/ml"
)

// tierBackend is what the tiering asks of a backend beside the methods of its tensors.
type tierBackend interface {
	BackendDevices() []ml.DeviceInfo
	KVTierSync()
	KVTierCPU() string
	KVTierLibc() string
	KVTierLibraries() string
	KVTierPinned(bytes int) []byte
	KVPagedEngine() string
	ExactAttnAnyCut() bool
	ExactAttnReads(cache []ml.Tensor) func(batch ml.Context) string
	ExactAttnRefused() int
}

// tierComputing says what computes the model and which layer where. by is the ComputedBy of its cache.
func tierComputing(backend tierBackend, by string, layers []kvtier.Layer, assigned ml.GPULayersList) string {
	computing := kvtier.Computing{CPU: backend.KVTierCPU(), Libc: backend.KVTierLibc(), Attention: backend.KVPagedEngine()}
	devices := backend.BackendDevices()
	for _, d := range devices {
		computing.Devices = append(computing.Devices, tierDevice(d))
	}
	for i, kind := range by {
		place := kvtier.OnHost
		if kind != 'h' {
			place = tierPlace(layers[i].Layer, assigned, devices)
		}
		computing.Places = append(computing.Places, place)
	}
	return computing.Extra()
}

// tierPlace is the name of the device that a layer was assigned to.
func tierPlace(layer int, assigned ml.GPULayersList, devices []ml.DeviceInfo) string {
	for _, gpu := range assigned {
		at := slices.IndexFunc(devices, func(d ml.DeviceInfo) bool { return d.DeviceID == gpu.DeviceID })
		if at >= 0 && slices.Contains(gpu.Layers, layer) {
			return tierDevice(devices[at]).Name()
		}
	}
	return kvtier.OnDevice
}

func tierDevice(d ml.DeviceInfo) kvtier.Device {
	return kvtier.Device{
		Library: d.Library, Description: d.Description, ComputeMajor: d.ComputeMajor, ComputeMinor: d.ComputeMinor,
		DriverMajor: d.DriverMajor, DriverMinor: d.DriverMinor, Libraries: d.LibraryPath,
	}
}

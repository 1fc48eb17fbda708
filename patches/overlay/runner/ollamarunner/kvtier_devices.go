package ollamarunner

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/ml"
)

// tierBackend is what the tiering asks of a backend beside the methods of its tensors.
type tierBackend interface {
	BackendDevices() []ml.DeviceInfo
	KVTierSync()
	KVTierCPU() string
	KVTierLibc() string
}

// tierComputing says what computes the model and which layer where: K/V of other code, another device or another driver
// differs in its last bits. Even with every layer on a GPU the CPU looks up the tokens' embeddings.
func tierComputing(backend tierBackend, hosts string, layers []kvtier.Layer, assigned ml.GPULayersList) string {
	devices := backend.BackendDevices()
	names := tierDeviceNames(devices)
	listed := "none"
	if len(names) > 0 {
		listed = strings.Join(names, " | ")
	}
	parts := kvtier.Part("devices", listed) + kvtier.Part("cpu", backend.KVTierCPU()) + kvtier.Part("libc", backend.KVTierLibc()) +
		kvtier.Part("rows", tierPlacement(hosts, layers, assigned, devices))
	return strings.TrimPrefix(parts, ";")
}

// tierDeviceName has the full name of the card: two of one compute capability split their sums by the number of their
// processors.
func tierDeviceName(d ml.DeviceInfo) string {
	libraries := []string{}
	for _, path := range d.LibraryPath {
		libraries = append(libraries, filepath.Base(path))
	}
	return fmt.Sprintf("%s %d.%d %s, driver %d.%d, %s", d.Library, d.ComputeMajor, d.ComputeMinor, d.Description,
		d.DriverMajor, d.DriverMinor, strings.Join(libraries, "+"))
}

// tierDeviceNames are those of the devices, each kind once, in an order that does not depend on how they are plugged in.
func tierDeviceNames(devices []ml.DeviceInfo) []string {
	names := []string{}
	for _, d := range devices {
		names = append(names, tierDeviceName(d))
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// tierPlacement has a letter for every layer: h where the host computes it, else a digit that names the kind of device by
// its place in tierDeviceNames, d where that is not known. Which layer goes to which of two unlike cards follows from their
// free memory when the model is loaded. hosts is kvcache's KVTierPlacement.
func tierPlacement(hosts string, layers []kvtier.Layer, assigned ml.GPULayersList, devices []ml.DeviceInfo) string {
	names := tierDeviceNames(devices)
	kind := map[int]int{}
	for _, gpu := range assigned {
		at := slices.IndexFunc(devices, func(d ml.DeviceInfo) bool { return d.DeviceID == gpu.DeviceID })
		if at < 0 {
			continue
		}
		for _, layer := range gpu.Layers {
			kind[layer] = slices.Index(names, tierDeviceName(devices[at]))
		}
	}
	var s strings.Builder
	for i, host := range hosts {
		if number, ok := kind[layers[i].Layer]; ok && host != 'h' {
			s.WriteString(fmt.Sprintf("%x", number))
		} else {
			s.WriteRune(host)
		}
	}
	return s.String()
}

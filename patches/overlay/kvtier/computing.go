package kvtier

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Device is one that computes layers beside the CPU, in GGML's words.
type Device struct {
	Library, Description       string
	ComputeMajor, ComputeMinor int
	DriverMajor, DriverMinor   int
	Libraries                  []string // paths of GGML's own
}

// Name has the full name of the card: two of one compute capability split their sums by the number of their processors.
func (d Device) Name() string {
	libraries := []string{}
	for _, path := range d.Libraries {
		libraries = append(libraries, filepath.Base(path))
	}
	return fmt.Sprintf("%s %d.%d %s, driver %d.%d, %s", d.Library, d.ComputeMajor, d.ComputeMinor, d.Description,
		d.DriverMajor, d.DriverMinor, strings.Join(libraries, "+"))
}

// Places of a layer that are no device's name.
const (
	OnHost   = "h"
	OnDevice = "d" // it is not known on which
)

// Computing is what computes a model, and which layer where: K/V of other code, another device or another driver differs in
// its last bits. Even with every layer on a GPU the CPU looks up the tokens' embeddings. Variables of this process count, too.
type Computing struct {
	CPU, Libc string
	Attention string // what computes attention on the devices, where that is not GGML's own libraries
	Devices   []Device
	Places    []string // of every layer: a device's Name, OnHost or OnDevice
}

// Extra returns the parts of a namespace's `extra` that say so. Devices are listed by name, each kind once, whatever the order
// in which they are plugged in; a layer has a letter, or a hexadecimal digit: its device's place in that list. Which layer goes to
// which of two unlike cards follows from their free memory when the model is loaded.
func (c Computing) Extra() string {
	names := []string{}
	for _, d := range c.Devices {
		names = append(names, d.Name())
	}
	slices.Sort(names)
	names = slices.Compact(names)
	var rows strings.Builder
	for _, place := range c.Places {
		switch at := slices.Index(names, place); {
		case at >= 0:
			fmt.Fprintf(&rows, "%x", at)
		case place == OnHost:
			rows.WriteString(OnHost)
		default:
			rows.WriteString(OnDevice)
		}
	}
	listed := "none"
	if len(names) > 0 {
		listed = strings.Join(names, " | ")
	}
	parts := Part("devices", listed) + Part("cpu", c.CPU) + Part("libc", c.Libc)
	parts += Part("variables", variables(os.Environ())) + Part("paged", c.Attention) + Part("rows", rows.String())
	return strings.TrimPrefix(parts, ";")
}

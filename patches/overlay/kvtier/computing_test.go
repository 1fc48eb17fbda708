package kvtier

import (
	"strings"
	"testing"
)

func card(description string, driver int) Device {
	return Device{
		Library: "CUDA", Description: description, ComputeMajor: 8, ComputeMinor: 6, DriverMajor: driver,
		Libraries: []string{"/opt/lib/ollama", "/opt/lib/ollama/cuda_v12"},
	}
}

func TestWhatComputesAModelIsSaidInFull(t *testing.T) {
	one, other := card("RTX 3090", 12), card("RTX 3060", 12)
	said := Computing{
		CPU: "AVX2,FMA", Libc: "2.36", Devices: []Device{one, other, one},
		Places: []string{OnHost, other.Name(), one.Name(), OnDevice, "a card that is not listed"},
	}.Extra()
	want := "devices=CUDA 8.6 RTX 3060, driver 12.0, ollama+cuda_v12 | CUDA 8.6 RTX 3090, driver 12.0, ollama+cuda_v12" +
		";cpu=AVX2,FMA;libc=2.36;rows=h01dd"
	if said != want {
		t.Errorf("%s, want %s", said, want)
	}
	if got := (Computing{Places: []string{OnHost}}).Extra(); got != "devices=none;rows=h" {
		t.Errorf("nothing but a CPU that says nothing of itself: %s", got)
	}
}

func TestWhatComputesAttentionOnDevicesIsSaidWhereItIsNotTheirLibrary(t *testing.T) {
	computing := Computing{Libc: "2.36", Places: []string{OnHost}}
	if got := computing.Extra(); got != "devices=none;libc=2.36;rows=h" {
		t.Error(got)
	}
	computing.Attention = "exact.0123456789abcdef"
	if got := computing.Extra(); got != "devices=none;libc=2.36;paged=exact.0123456789abcdef;rows=h" {
		t.Error(got)
	}
}

func TestEveryWordOfADeviceCounts(t *testing.T) {
	names := map[string]bool{card("RTX 3090", 12).Name(): true}
	for _, change := range []func(*Device){
		func(d *Device) { d.Library = "ROCm" },
		func(d *Device) { d.Description = "RTX 3060" },
		func(d *Device) { d.ComputeMajor++ },
		func(d *Device) { d.ComputeMinor++ },
		func(d *Device) { d.DriverMajor++ },
		func(d *Device) { d.DriverMinor++ },
		func(d *Device) { d.Libraries = d.Libraries[:1] },
	} {
		d := card("RTX 3090", 12)
		change(&d)
		if names[d.Name()] {
			t.Errorf("%s is another's name", d.Name())
		}
		names[d.Name()] = true
	}
	if strings.Contains(card("", 1).Name(), "/opt") {
		t.Error("where the libraries lie is not what they are")
	}
}

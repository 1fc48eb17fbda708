package cpu

// #cgo CPPFLAGS: -I${SRCDIR}
import "C"

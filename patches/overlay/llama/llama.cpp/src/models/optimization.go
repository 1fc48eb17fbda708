// The level that upstream itself builds this package with. -O3, which we ask for GGML, makes nothing here faster and takes 18 % longer to compile.

package models

// #cgo CXXFLAGS: -O2
import "C"

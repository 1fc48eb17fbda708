package kvcache

import (
	"reflect"
	"slices"

	"github.com/ollama/ollama/ml"
)

// tierKnown are the fields of stock's caches that hold tensors or other caches: what is tiered, and what is made anew for each batch
// (curLoc, curMask, curSlotsInput).
var tierKnown = []string{
	"Causal.curLoc", "Causal.curMask", "Causal.keys", "Causal.values",
	"WrapperCache.caches",
	"Recurrent.kv", "Recurrent.convStates", "Recurrent.recurrentStates", "Recurrent.curSlotsInput",
	"checkpointEntry.conv", "checkpointEntry.recurrent",
}

// tierUnknown names a field of a cache that may hold rows which nothing here knows of, or "". A cache that embeds another one has
// all its methods, and passes for it: rows of a field that it has beside it would neither be stored nor come back, and nothing would
// say so. The same is asked of stock's own types, in a version with a field more.
func tierUnknown(cache Cache) string {
	of := tierElement(reflect.TypeOf(cache))
	if tierStocks(of) {
		return tierUnknownField(of, nil)
	}
	if of.Kind() != reflect.Struct {
		return of.String()
	}
	for i := range of.NumField() {
		field := of.Field(i)
		if i == 0 && field.Anonymous && tierStocks(tierElement(field.Type)) {
			if unknown := tierUnknownField(field.Type, nil); unknown != "" {
				return unknown
			}
		} else if tierHolds(field.Type) || tierUnknownField(field.Type, nil) != "" {
			return of.Name() + "." + field.Name
		}
	}
	return ""
}

// tierStocks reports whether a type is a cache of stock's that is tiered.
func tierStocks(of reflect.Type) bool {
	return of.PkgPath() == reflect.TypeFor[Causal]().PkgPath() && slices.Contains([]string{"Causal", "WrapperCache", "Recurrent"}, of.Name())
}

// tierUnknownField looks through the fields of a type, and of the types in it.
func tierUnknownField(of reflect.Type, seen []reflect.Type) string {
	of = tierElement(of)
	if of.Kind() != reflect.Struct || slices.Contains(seen, of) {
		return ""
	}
	seen = append(seen, of)
	for i := range of.NumField() {
		field := of.Field(i)
		if name := of.Name() + "." + field.Name; tierHolds(field.Type) && !slices.Contains(tierKnown, name) {
			return name
		}
		if unknown := tierUnknownField(field.Type, seen); unknown != "" {
			return unknown
		}
	}
	return ""
}

// tierHolds reports whether a type, or what it is a list or a map of, is a tensor, a cache, or something that may be either.
func tierHolds(of reflect.Type) bool {
	of = tierElement(of)
	if of.Kind() == reflect.Interface {
		return !slices.Contains([]reflect.Type{reflect.TypeFor[ml.Context](), reflect.TypeFor[ml.Backend](), reflect.TypeFor[error]()}, of)
	}
	return reflect.PointerTo(of).Implements(reflect.TypeFor[ml.Tensor]()) || reflect.PointerTo(of).Implements(reflect.TypeFor[Cache]())
}

func tierElement(of reflect.Type) reflect.Type {
	for slices.Contains([]reflect.Kind{reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map}, of.Kind()) {
		of = of.Elem()
	}
	return of
}

package kvcache

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/ollama/ollama/ml"
)

func TestTierStocksOwnCachesHoldNothingUnknown(t *testing.T) {
	for _, cache := range []Cache{NewCausalCache(nil), NewSWACache(4, nil), NewWrapperCache(NewSWACache(4, nil), NewCausalCache(nil))} {
		if unknown := tierUnknown(cache); unknown != "" {
			t.Errorf("%T: %s", cache, unknown)
		}
	}
}

func TestTierAFieldMoreIsFoundWhereverItIs(t *testing.T) {
	type inner struct{ index map[int]ml.Tensor }
	for name, of := range map[string]reflect.Type{
		"a tensor":            reflect.TypeFor[struct{ more ml.Tensor }](),
		"a list of them":      reflect.TypeFor[struct{ more []ml.Tensor }](),
		"a map of structures": reflect.TypeFor[struct{ more map[int]*inner }](),
		"a cache":             reflect.TypeFor[struct{ more *Causal }](),
		"any cache":           reflect.TypeFor[struct{ more Cache }](),
		"anything":            reflect.TypeFor[struct{ more any }](),
	} {
		if tierUnknownField(of, nil) == "" {
			t.Errorf("%s is not found", name)
		}
	}
	harmless := reflect.TypeFor[struct {
		numbers map[int][]int32
		backend ml.Backend
		ctxs    map[int]ml.Context
		shift   shiftFn
		failed  error
	}]()
	if unknown := tierUnknownField(harmless, nil); unknown != "" {
		t.Errorf("%s holds no rows", unknown)
	}
}

func TestTierACacheAroundAnotherIsNotTakenForIt(t *testing.T) {
	type around struct{ *Causal }
	if c, reason := KVTierCacheOf(around{NewCausalCache(nil)}); c != nil || !strings.Contains(reason, "not supported") {
		t.Errorf("%v, %q", c, reason)
	}
}

func TestTierTheCachesInAWrapperAreLookedInto(t *testing.T) {
	known := tierKnown
	t.Cleanup(func() { tierKnown = known })
	tierKnown = slices.DeleteFunc(slices.Clone(known), func(name string) bool { return name == "Causal.keys" }) // as if it were new
	for _, cache := range []Cache{NewCausalCache(nil), NewWrapperCache(NewSWACache(4, nil), NewCausalCache(nil))} {
		if c, reason := KVTierCacheOf(cache); c != nil || !strings.Contains(reason, "Causal.keys") {
			t.Errorf("%T: %v, %q", cache, c, reason)
		}
	}
}

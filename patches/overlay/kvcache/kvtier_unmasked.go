package kvcache

import "slices"

// Unmasked are the inputs of the last batch, by number, that see what comes after them in it: those of images, in some models.
func (c *KVTierCache) Unmasked() (inputs []int) {
	for _, child := range c.children {
		inputs = append(inputs, child.opts.Except...)
	}
	slices.Sort(inputs)
	return slices.Compact(inputs)
}

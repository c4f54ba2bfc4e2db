package leanattention_test

import (
	"bytes"
	"fmt"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/rope"

	"gorgonia.org/tensor"
)

// deviceEight returns the configuration of a small cache of 8 bits that GPUs have, and, of kinds from 6 on, of 4 bits.
func deviceEight(kind int, gpu *device.GPU) la.CacheConfig {
	if kind >= 6 {
		return la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 64 << (kind % 2), DType: la.Q4, Device: gpu}
	}
	c := la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 64 << (kind / 2 % 2), DType: eightTypes[kind%2], Scales: la.Scales(kind % 3), Device: gpu}
	if c.Scales == la.ScalesByHead {
		c.KeyScales = []float32{0.05, 0.125, 0.03, 0.07}
	}
	return c
}

// TestGPUEight decodes on caches of 8 bits on a GPU: copy on write, forks, trees, all types of queries, masks and released pages.
func TestGPUEight(t *testing.T) { testGPUEight(t, devicetest.Open(t), 0, 1, 2, 3, 4, 5, 6, 7, 8) }

// TestGPUsEight: two GPUs have the heads of such a cache.
func TestGPUsEight(t *testing.T) { testGPUEight(t, devicetest.OpenSome(t, 2), 0, 1, 2, 6, 7) }

func testGPUEight(t *testing.T, gpu *device.GPU, kinds ...int) {
	rng := reftest.Rand(t)
	for _, kind := range kinds {
		config := deviceEight(kind, gpu)
		config.PageSize, config.Pages = []int{16, 4, 64}[rng.IntN(3)], 120
		at := graphtest.Place{GPU: gpu, Real: true, There: kind%2 == 0}
		query := at.Queries()[kind%3]
		heads := []int{2, 8, 18}[rng.IntN(3)]
		switch (kind + 1) % 3 {
		case 0:
			at.ScoreMods = reftest.RandomScoreMods(rng, reftest.Shape{Heads: heads})
		case 1:
			config.Window, config.SinkTokens = 20, 3*(kind%2)
			at.ScoreMods.Window, at.ScoreMods.SinkTokens, at.ScoreMods.SoftCap = 1+rng.IntN(20), config.SinkTokens, 30
		}
		t.Run(fmt.Sprintf("%v %v %v pages of %d", config.DType, config.Scales, query, config.PageSize), func(t *testing.T) {
			cache := graphtest.NewCache(t, config)
			la.PoisonFree(cache)
			d := graphtest.NewDecoderAt(t, at, cache, 40, heads, query, true)
			one, two := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
			d.Do(t, rng, reftest.Normal, graphtest.Appended{To: one, Tokens: 34}, graphtest.Appended{To: two, Tokens: 3})
			fork := one.Fork(t)
			d.Do(t, rng, reftest.Peaked, graphtest.Appended{To: one, Tokens: 1}, graphtest.Appended{To: two, Tokens: 4}, graphtest.Appended{To: fork, Tokens: 2})
			if config.Scales != la.ScalesByPage && at.ScoreMods.Window == 0 && at.ScoreMods.Slopes == nil {
				d.Do(t, rng, reftest.Normal, graphtest.Appended{To: one, Tokens: 5, Tree: reftest.RandomTree(rng, 5)}, graphtest.Appended{To: two, Tokens: 1})
			}
			d.Do(t, rng, reftest.Normal, graphtest.Appended{To: fork, Tokens: 1}, graphtest.Appended{To: one, Tokens: 1})
			closeCache(t, cache)
		})
	}
}

// TestGPUEightBits: a GPU stores the bits that the CPU stores, in whatever way a text comes, and reads what the CPU saved.
func TestGPUEightBits(t *testing.T) {
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	const tokens = 40
	for turn := range 12 {
		kind, turned := turn%8, turn >= 8 // turned: with a rotary embedding
		config := deviceEight(kind, nil)
		config.ValueDim = config.HeadDim // of newEightText
		config.PageSize, config.Pages = 4, 40
		x := newEightText(rng, config, tokens)
		var saved [2][]byte
		for i, on := range []*device.GPU{nil, gpu} {
			config.Device = on
			cache := graphtest.NewCache(t, config)
			la.PoisonFree(cache)
			at := graphtest.Place{GPU: on, Real: on != nil}
			if turned {
				at.Rotary = &rope.Config{HeadDim: config.HeadDim, Dim: 12}
			}
			d := graphtest.NewDecoderAt(t, at, cache, tokens, eightHeads, tensor.Float32, true)
			s := newSequence(t, cache)
			if i == 0 {
				appendText(t, rng, d, s, x, rowsFrom(0, tokens), nil)
			} else {
				appendText(t, rng, d, s, x, rowsFrom(0, 17), nil)
				fork, err := s.Fork()
				if err != nil {
					t.Fatal(err)
				}
				appendText(t, rng, d, fork, x, rowsFrom(3, 9), nil)
				appendText(t, rng, d, s, x, rowsFrom(5, 11), nil, fork)
				if err := s.Truncate(17); err != nil {
					t.Fatal(err)
				}
				appendText(t, rng, d, s, x, rowsFrom(17, tokens-18), nil, fork)
				read, err := cache.ReadSequence(bytes.NewReader(savedBytes(t, s)))
				if err != nil {
					t.Fatal(err)
				}
				s = read
				appendText(t, rng, d, s, x, rowsFrom(tokens-1, 1), nil)
			}
			saved[i] = savedBytes(t, s)
			if i == 1 {
				read, err := cache.ReadSequence(bytes.NewReader(saved[0]))
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(savedBytes(t, read), saved[0]) {
					t.Errorf("%v, %v: a file of the CPU has other bits on %v", config.DType, config.Scales, gpu)
				}
			}
			closeCache(t, cache)
		}
		if turned { // cosines differ in their last bits, and some elements round to a neighbour
			other := 0
			for i := range saved[0] {
				if saved[0][i] != saved[1][i] {
					other++
				}
			}
			if len(saved[0]) != len(saved[1]) || other > len(saved[0])/50 {
				t.Errorf("%v, %v: %d of %d bytes of %v are not those of the CPU, with a rotary embedding", config.DType, config.Scales, other, len(saved[0]), gpu)
			}
		} else if !bytes.Equal(saved[0], saved[1]) {
			t.Errorf("%v, %v: %v stores other bits than the CPU", config.DType, config.Scales, gpu)
		}
	}
}

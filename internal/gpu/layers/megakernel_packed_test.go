package layers

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"
)

// packedFormats are the formats of 8 and 4 bits that a megakernel takes.
func packedFormats() []weight.Format {
	return slices.DeleteFunc(packable(), func(f weight.Format) bool {
		p, err := weight.Packing(&weight.Matrix{Format: f, Len: 256}, 256)
		return err != nil || p.Super
	})
}

// testMegakernelPacked runs random stacks whose weights have 8 or 4 bits, as testMegakernel.
func testMegakernelPacked(t *testing.T, m *machine, d *Engine, cases, longest, widest int) {
	rng := reftest.Rand(t)
	formats := packedFormats()
	for _, shape := range [...]shapeOfBlocks{optShape, llamaShape} { // kernels may have all shared memory that there is when they are loaded
		if !d.hasShape(shape, true) {
			t.Skip("no megakernels for packed weights on this GPU")
		}
	}
	shared := d.info.SharedPerBlockMost
	defer func() { d.info.SharedPerBlockMost = shared }()
	start := rng.IntN(2 * len(formats))
	for i := start; i < start+cases; i++ {
		d.info.SharedPerBlockMost = min(shared, enginetest.Pick(rng, 180, 205, 227)<<10)
		group := enginetest.Pick(rng, 1, 1, 2, 4)
		sh := stackShape{
			rows: 1 + rng.IntN(packedRows), blocks: enginetest.Pick(rng, 1, 2), dim: packedDims[rng.IntN(len(packedDims))], packed: formats[i%len(formats)], packedHead: rng.IntN(2) == 0,
			inner: 128 * enginetest.Pick(rng, 1, 2, 3, 8, 17, 32, 48, 72), vocabulary: enginetest.Pick(rng, 0, 7, 777), pageTokens: enginetest.Pick(rng, 16, 64, 128),
			kv: []attn.DType{attn.Float16, attn.BFloat16}[rng.IntN(2)], linear: rng.IntN(4) == 0, llama: rng.IntN(2) == 0, gelu: rng.IntN(2) == 0, tables: rng.IntN(3),
		}
		sh.inner = min(sh.inner, widest/128*128)
		sh.kvHeads = min(enginetest.Pick(rng, 1, 2, 3, 12), max(widest/sh.dim/group, 1))
		sh.heads = group * sh.kvHeads
		for sh.heads*sh.dim%128 != 0 {
			sh.kvHeads, sh.heads = 2*sh.kvHeads, 2*sh.heads
		}
		sh.choose = sh.vocabulary > 0 && rng.IntN(4) > 0
		for range sh.rows {
			sh.keys = append(sh.keys, min(enginetest.Pick(rng, 0, 1, 2, 63, 64, 65, 130, 1+rng.IntN(5000)), longest))
		}
		testStack(t, m, d, rng, fmt.Sprintf("case %d: %+v", i, sh), sh)
	}
}

// checkPacked compares layers with packed weights with float64, of the x that the layers had.
func (s *stack) checkPacked(t testing.TB, name string) {
	t.Helper()
	for i := range s.ops {
		o := s.ops[i].linear
		if s.numbers[o] == nil {
			continue
		}
		floats := func(n int, read func() []byte) []float64 {
			all, x := read(), make([]float64, n)
			for k := range x {
				x[k] = enginetest.Get(all, k, attn.Float32)
			}
			return x
		}
		x := floats(o.Rows*o.In, func() []byte { return enginetest.Read(t, &o.X) })
		left := x
		if o.Norm != nil {
			gamma := floats(o.In, func() []byte { return enginetest.Read(t, &o.Norm.Gamma) })
			if o.Norm.RMS {
				left = rmsNormed(x, o.In, gamma, nil, o.Norm.UnitOffset, o.Norm.Eps)
			} else {
				left = normed(x, o.In, gamma, floats(o.In, func() []byte { return enginetest.Read(t, &o.Norm.Beta) }), o.Norm.Eps)
			}
		}
		part := func(j, r, c int) (sum, bound float64) {
			top := 0.0
			for k := range o.In {
				w, size, v := s.numbers[o][j][c*o.In+k], s.sizes[o][j][c*o.In+k], left[r*o.In+k]
				sum += v * w
				bound += (math.Abs(v) + 1) * size // beta and the mean are of the size of 1
				top = max(top, math.Abs(v))
			}
			bound = 0x1p-15 * bound
			for k := range o.In { // parts below the smallest float16
				bound += 0x1p-26 * top * s.sizes[o][j][c*o.In+k]
			}
			return sum, bound
		}
		for j := range o.Parts {
			if o.Gate && j > 0 {
				break
			}
			p := &o.Parts[j]
			var b, residual []float64
			if p.B.Buffer != nil {
				b = floats(p.Out, func() []byte { return enginetest.Read(t, &p.B) })
			}
			if o.Residual.Buffer != nil {
				residual = floats(o.Rows*p.Out, func() []byte { return enginetest.Read(t, &o.Residual) })
			}
			y := enginetest.Read(t, &p.Y)
			for r := range o.Rows {
				for c := range p.Out {
					want, bound := part(j, r, c)
					if b != nil {
						want += b[c]
					}
					bound = reftest.MostSlope*bound + 0x1p-20*math.Abs(want)
					want = reftest.Activated(o.Activation, want)
					if o.Gate {
						up, off := part(1, r, c)
						want, bound = want*up, bound*math.Abs(up)+(math.Abs(want)+bound)*off+0x1p-20*math.Abs(want*up)
					}
					if residual != nil {
						want += residual[r*p.Out+c]
						bound += 0x1p-20 * (math.Abs(want) + math.Abs(residual[r*p.Out+c]))
					}
					if got := enginetest.Get(y, r*p.Out+c, attn.Float32); !(math.Abs(got-want) <= bound) && !math.IsNaN(want) {
						t.Fatalf("%s: layer %d, part %d, row %d, column %d: %v, want %v, bound %v", name, i, j, r, c, got, want, bound)
					}
				}
			}
		}
	}
}

// As TestGPUMegakernelRepeats, of packed weights.
func TestGPUMegakernelPackedRepeats(t *testing.T) {
	m, d := realDecoder(t)
	rng := reftest.Rand(t)
	for _, sh := range []stackShape{
		{rows: 1, heads: 8, kvHeads: 4, dim: 128, inner: 2048, packed: weight.Int4_128, llama: true},
		{rows: 2, heads: 8, kvHeads: 8, dim: 64, inner: 1024, packed: weight.Int8},
		{rows: 1, heads: 8, kvHeads: 8, dim: 64, inner: 1024, packed: weight.Q4_1, llama: true},
	} {
		sh.blocks, sh.pageTokens, sh.kv = 1, 64, attn.Float16
		for range sh.rows {
			sh.keys = append(sh.keys, 300)
		}
		s := newStack(t, m, d, rng, sh)
		megakernel, g := s.captured(t)
		var first [][]byte
		for launch := range enginetest.OrShort(5000, 500) {
			noError(t, m.Stream.Launch(g))
			m.Settle(t)
			for j := range s.outs {
				got := enginetest.Read(t, &s.outs[j])
				if launch == 0 {
					first = append(first, got)
				} else if !bytes.Equal(got, first[j]) {
					t.Fatalf("%+v: output %d of launch %d differs from the first one's", sh, j, launch)
				}
			}
		}
		noError(t, g.Close())
		noError(t, megakernel.Close())
		s.close(t)
	}
}

func TestGPUMegakernelPacked(t *testing.T) {
	m, d := realDecoder(t)
	testMegakernelPacked(t, m, d, enginetest.OrShort(40, 8), 5000, 1536)
}

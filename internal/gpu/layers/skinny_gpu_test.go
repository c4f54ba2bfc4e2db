package layers

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// inTurn are the median times of graphs that are launched in turn.
func (m *machine) inTurn(b *testing.B, runs int, graphs []*cuda.Graph) []time.Duration {
	begin, err := m.Dev.NewEvent(true)
	noError(b, err)
	end, err := m.Dev.NewEvent(true)
	noError(b, err)
	all := make([][]time.Duration, len(graphs))
	for range runs {
		for i, g := range graphs {
			noError(b, m.Stream.Record(begin))
			noError(b, m.Stream.Launch(g))
			noError(b, m.Stream.Record(end))
			noError(b, m.Stream.Synchronize())
			took, err := end.Since(begin)
			noError(b, err)
			all[i] = append(all[i], took)
		}
	}
	medians := make([]time.Duration, len(graphs))
	for i := range all {
		slices.Sort(all[i])
		medians[i] = all[i][runs/2]
	}
	return medians
}

// BenchmarkGPUBatchLinears is the linear layers of decode steps of 17 to 128 sequences, each
// kind by itself and all of them as a step has them: as they are launched, with x in two parts and
// rounded, as all clusters of skinny GEMMs do it (with x rounded, and with 64 rows of it copied to shared
// memory instead of registers), and as tiles. GB/s are those of the weights, and `share` is the part of
// the read ceiling, which us/ceiling is the time of for as many bytes.
func BenchmarkGPUBatchLinears(b *testing.B) {
	m, d := realDecoder(b)
	rng := rand.New(rand.NewPCG(1, 2))
	type variant struct {
		name    string
		leftOut []int
		splits  []int

		round, copied bool
	}
	variants := []variant{{"best", nil, skinnySplits[:], false, false}, {"rounded", nil, skinnySplits[:], true, false}, {"tiled", []int{32, 64}, skinnySplits[:], false, false}}
	for _, rows := range []int{32, 64} {
		for _, split := range []int{4, 8, 16} {
			name := fmt.Sprintf("%dx%d", rows, split)
			variants = append(variants, variant{name, []int{96 - rows}, []int{split}, false, false}, variant{name + "/rounded", []int{96 - rows}, []int{split}, true, false})
			if rows == 64 {
				variants = append(variants, variant{name + "/rounded/copied", []int{96 - rows}, []int{split}, true, true})
			}
		}
	}
	defer func() { d.leftOut, d.splits, d.copied = nil, skinnySplits[:], false }()
	for _, s := range []struct {
		name             string
		blocks, h, inner int
	}{{"1.3b", 24, 2048, 8192}, {"6.7b", 8, 4096, 16384}} {
		const most = 128
		layers := []struct {
			name           string
			in, out, parts int
			norm, residual bool
			activation     attn.Activation
		}{{"qkv", s.h, s.h, 3, true, false, 0}, {"out", s.h, s.h, 1, false, true, 0}, {"fc1", s.h, s.inner, 1, true, false, attn.ReLU}, {"fc2", s.inner, s.h, 1, false, true, 0}}
		perBlock := 0
		for _, l := range layers {
			perBlock += l.in * l.out * l.parts
		}
		weights := m.filled(b, rng, attn.Float16, s.blocks*perBlock, 1/math.Sqrt(float64(s.h)))
		affine, wide, scratch := m.filled(b, rng, attn.Float32, s.inner, 1), m.filled(b, rng, attn.Float32, most*s.inner, 1), m.empty(b, most*(s.inner+1))
		var small []gpu.Memory
		for range 5 {
			small = append(small, m.filled(b, rng, attn.Float32, most*s.h, 1))
		}
		for _, rows := range []int{32, 64, most} {
			ops, at := make([]Linear, 0, 4*s.blocks), 0
			for range s.blocks {
				for _, l := range layers {
					o := Linear{Rows: rows, In: l.in, X: small[0], Early: true, Scratch: scratch, Activation: l.activation}
					if l.in == s.inner {
						o.X = wide
					}
					if l.norm {
						o.Norm = &Norm{Gamma: affine, Beta: affine, Eps: 1e-5}
					}
					for i := range l.parts {
						p := LinearPart{W: gpu.Memory{Buffer: weights.Buffer, Offset: weights.Offset + int64(at)*2, DType: attn.Float16, Len: l.in * l.out}, B: affine, Y: small[i+1], Out: l.out}
						if at += p.W.Len; l.out == s.inner {
							p.Y = wide
						}
						o.Parts = append(o.Parts, p)
					}
					if l.residual {
						o.Residual, o.Parts[0].Y = small[0], small[0]
						if l.name == "out" {
							o.X = small[1]
						}
					}
					ops = append(ops, o)
				}
			}
			for kind := range 5 {
				name, first, step, bytes := "all", 0, 1, 2*perBlock
				if kind < 4 {
					name, first, step, bytes = layers[kind].name, kind, 4, 2*layers[kind].in*layers[kind].out*layers[kind].parts
				}
				b.Run(fmt.Sprintf("%s/rows%d/%s", s.name, rows, name), func(b *testing.B) {
					var graphs []*cuda.Graph
					var names []string
					add := func(name string, queue func() error) {
						g, err := m.Stream.Capture(queue)
						noError(b, err)
						graphs, names = append(graphs, g), append(names, name)
					}
					for _, v := range variants {
						d.leftOut, d.splits, d.copied = v.leftOut, v.splits, v.copied
						for i := range ops {
							ops[i].RoundX = v.round
						}
						if l, ok, err := d.configureSkinny(&ops[first]); len(v.splits) > 1 {
							chosen := "tiled"
							if ok {
								chosen = fmt.Sprintf("%dx%d, %d below, %d clusters, %d stages", skinnyKinds[l.kind].rows, l.split, l.below, l.clusters, l.stages)
							}
							b.Logf("%s: %s", v.name, chosen)
						} else if noError(b, err); !ok || kind == 4 {
							continue
						}
						add(v.name, func() error {
							for i := first; i < len(ops); i += step {
								if err := d.Linear(m.Stream, &ops[i]); err != nil {
									return err
								}
							}
							return nil
						})
					}
					add("ceiling", m.Ceiling(b, weights, small[4]))
					times := m.inTurn(b, 15, graphs)
					ceiling := float64(2*weights.Len) / times[len(times)-1].Seconds()
					for i, name := range names {
						each := times[i].Seconds() / float64(s.blocks)
						if name == "ceiling" {
							each = float64(bytes) / ceiling
						}
						b.ReportMetric(each*1e6, "us/"+name)
						if i < 3 {
							b.ReportMetric(float64(bytes)/each/1e9, "GB/s/"+name)
							b.ReportMetric(float64(bytes)/each/ceiling, "share/"+name)
						}
						noError(b, graphs[i].Close())
					}
					b.ReportMetric(0, "ns/op")
				})
			}
		}
		for _, x := range append(small, weights, affine, wide, scratch) {
			noError(b, x.Buffer.Close())
		}
	}
}

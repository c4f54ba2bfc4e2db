//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// rotatedHead rotates the first elements of x.
func rotatedHead(x, cos, sin []float64, interleaved bool) {
	for i := range cos {
		a, b := i, i+len(cos)
		if interleaved {
			a, b = 2*i, 2*i+1
		}
		x[a], x[b] = x[a]*cos[i]-x[b]*sin[i], x[b]*cos[i]+x[a]*sin[i]
	}
}

// randomRotary draws the rotary embedding of heads of dim elements.
func randomRotary(rng *rand.Rand, dim int) attn.Rotary {
	pairs := enginetest.Pick(rng, dim/2, dim/2, dim/4, 1, 1+rng.IntN(dim/2))
	w := make([]float64, pairs)
	for i := range w {
		w[i] = math.Pow(5e5, -float64(i)/float64(pairs))
	}
	first := enginetest.Pick(rng, 0, 0, dim-2*pairs, rng.IntN(dim-2*pairs+1))
	return attn.Rotary{HeadDim: dim, First: first, Interleaved: rng.IntN(2) == 0, Factor: enginetest.Pick(rng, 1, 1.1386), Turns: attn.TurningsOf(w)}
}

// testRotary: queries and new keys are rotated by the positions of their tokens. Values are not. Nothing else is
// written. Attention is the same as without the embedding.
func testRotary(t *testing.T, m *machine, cases int, trees bool) {
	rng := reftest.Rand(t)
	types := []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}
	plan, plain, shared := m.engine.NewPlan(), m.engine.NewPlan(), 0
	enough := func() bool { return shared > 0 || cases <= 12 || m.engine.blocks > 16 } // large GPUs share no short prefixes
	for i := range reftest.AtLeast(cases, enough) {
		shape := reftest.Shape{KVHeads: 1 + i%3, Dim: headDims[i%len(headDims)], Queries: []int{1, 0, 4, 1 + rng.IntN(20)}, Keys: []int{1 + rng.IntN(50), 3, 4 + rng.IntN(20), 20 + rng.IntN(9)}}
		shape.Heads, shape.ValueDim, shape.Causal = shape.KVHeads*enginetest.Pick(rng, 1, 3), shape.Dim, true
		if trees && rng.IntN(3) == 0 {
			shape = reftest.RandomTrees(rng, shape)
		}
		o := options{shape: &shape, kv: types[i%3]}
		if i%4 == 1 { // forks, whose common keys are attended to together
			o.forks, o.page = true, enginetest.Pick(rng, 1, 3)
		}
		p := m.newProblem(t, rng, reftest.Normal, o)
		g := &p.geometry
		g.Rotary = randomRotary(rng, g.Dim)
		for j := range p.seqs {
			p.seqs[j].Before = enginetest.Pick(rng, 0, rng.IntN(100), rng.IntN(1<<20), rng.IntN(1<<40))
		}
		newType, kv := enginetest.Pick(rng, types...), p.kv
		heads := g.KVHeads + rng.IntN(2) // KV heads of a row of new keys
		width := heads * g.Dim
		var fresh [2][]byte
		for j := range fresh {
			fresh[j] = enginetest.Poisoned(p.rows*width, newType)
			for _, s := range p.seqs {
				for r := s.Row * width; r < (s.Row+s.Queries)*width; r++ {
					enginetest.Put(fresh[j], r, newType, rng.NormFloat64())
				}
			}
		}
		newK, newV := m.Put(t, fresh[0], newType), m.Put(t, fresh[1], newType)
		query := enginetest.Read(t, &p.q)
		rotated := m.Put(t, enginetest.Poisoned(p.q.Len, p.query), p.query)
		noError(t, p.k.Buffer.Upload(p.k.Offset, p.pool[0]))
		noError(t, p.v.Buffer.Upload(p.v.Offset, p.pool[1]))
		noError(t, plan.Build(p.geometry, p.seqs, p.rows))
		noError(t, plan.Upload(m.Stream))
		wantError(t, "append", plan.AppendRows(m.Stream, attn.InPlanes(p.k, p.v), newK, newV, heads), attn.ErrShape, "AppendRotated")
		wantError(t, "run", plan.Run(m.Stream, p.operands()), gpu.ErrState, "q is not what AppendRotated has made")
		noError(t, plan.AppendRotated(m.Stream, attn.InPlanes(p.k, p.v), newK, newV, p.q, rotated, heads))
		m.Settle(t)

		// The expected results.
		wantK, wantV, wantQ := bytes.Clone(p.pool[0]), bytes.Clone(p.pool[1]), enginetest.Poisoned(p.q.Len, p.query)
		gotK, gotQ := enginetest.Read(t, &p.k), enginetest.Read(t, &rotated)
		pairs, x := g.Rotary.Turns.Len(), make([]float64, g.Dim)
		cos, sin := make([]float64, pairs), make([]float64, pairs)
		off := 0.0
		turn := func(want, got []byte, at int, dtype attn.DType, from []byte, of int, fromType attn.DType) {
			length := 0.0
			for c := range x {
				x[c] = enginetest.Get(from, of+c, fromType)
				length = max(length, math.Abs(x[c]))
			}
			rotatedHead(x[g.Rotary.First:], cos, sin, g.Rotary.Interleaved)
			for c, f := range x {
				bound := enginetest.Format(dtype).Unit()*math.Abs(f) + 0x1p-20*length
				if y := enginetest.Get(got, at+c, dtype); !(math.Abs(y-f) <= bound) {
					t.Errorf("element %d is %v, want %v", c, y, f)
				} else {
					off = max(off, math.Abs(y-f)/bound)
				}
				enginetest.Put(want, at+c, dtype, enginetest.Get(got, at+c, dtype)) // the rest is compared bit by bit
			}
		}
		for _, s := range p.seqs {
			for token := range s.Queries {
				for pair := range cos {
					sn, c := math.Sincos(g.Rotary.Turns.Of(pair).Angle(s.Position(token)))
					cos[pair], sin[pair] = g.Rotary.Factor*c, g.Rotary.Factor*sn
				}
				for h := range g.Heads {
					at := (s.Row+token)*g.Query.Row + h*g.Query.Head
					turn(wantQ, gotQ, at, p.query, query, at, p.query)
				}
				key := s.Keys - s.Queries + token
				for h := range g.KVHeads {
					to := int(s.Pages[key/g.PageTokens])*g.Pages.Planes[0].At.Page + h*g.Pages.Planes[0].At.Head + key%g.PageTokens*g.Dim
					turn(wantK, gotK, to, kv, fresh[0], (s.Row+token)*width+h*g.Dim, newType)
					for c := range g.Dim {
						enginetest.Put(wantV, to+c, kv, enginetest.Get(fresh[1], (s.Row+token)*width+h*g.Dim+c, newType))
					}
				}
			}
		}
		if !bytes.Equal(gotK, wantK) || !bytes.Equal(enginetest.Read(t, &p.v), wantV) || !bytes.Equal(gotQ, wantQ) {
			t.Errorf("something is written that should not be, or values are not what rounding gives")
		}

		// Attention equals that of a problem without the embedding.
		in := p.operands()
		in.Q = rotated
		noError(t, plan.Run(m.Stream, in))
		if plan.form.sharing.on() {
			shared++
		}
		m.Settle(t)
		out := append(enginetest.Read(t, &p.o), enginetest.Read(t, &p.lse)...)
		m.Poison(t, &p.o)
		m.Poison(t, &p.lse)
		g.Rotary = attn.Rotary{}
		noError(t, plain.Build(p.geometry, p.seqs, p.rows))
		noError(t, plain.Upload(m.Stream))
		noError(t, plain.Run(m.Stream, in))
		m.Settle(t)
		if !bytes.Equal(out, append(enginetest.Read(t, &p.o), enginetest.Read(t, &p.lse)...)) {
			t.Errorf("other bits than without")
		}
		if t.Failed() {
			t.Fatalf("%v to %v, %d of %d elements, %v: %v", newType, kv, 2*pairs, p.Dim, off, p)
		}
		for _, x := range []gpu.Memory{newK, newV, rotated} {
			noError(t, x.Buffer.Close())
		}
		p.close(t)
	}
	if !enough() {
		t.Error("no forks shared a prefix")
	}
	noError(t, plan.Close())
	noError(t, plain.Close())
}

func TestEmulatedRotary(t *testing.T) { testRotary(t, emulatedGPU(t, 3), 20, true) }

func TestGPURotary(t *testing.T) { testRotary(t, realGPU(t), enginetest.OrShort(60, 12), true) }

// AppendRotated refuses bad arguments without a launch. The plan is not offered to launches that do not rotate.
func TestAppendRotatedRefuses(t *testing.T) {
	m, lib, _ := fakeGPU(t, 90, 13, 232448)
	p := decodeStep(t, m)
	plan := m.engine.NewPlan()
	rotated := m.Put(t, enginetest.Poisoned(p.q.Len, p.query), p.query)
	build := func() {
		noError(t, plan.Build(p.geometry, p.seqs, p.rows))
		noError(t, plan.Upload(m.Stream))
	}
	call := func(q, to gpu.Memory) error {
		return plan.AppendRotated(m.Stream, attn.InPlanes(p.k, p.v), p.newK, p.newV, q, to, 0)
	}
	build()
	wantError(t, "no embedding", call(p.q, rotated), attn.ErrShape, "no rotary embedding")
	p.geometry.Rotary = randomRotary(p.rng, p.Dim)
	build()
	wrong := func(spoil func(m *gpu.Memory)) gpu.Memory {
		x := rotated
		spoil(&x)
		return x
	}
	wantError(t, "itself", call(rotated, rotated), attn.ErrShape, "memory in common")
	wantError(t, "none", call(gpu.Memory{}, rotated), attn.ErrShape, "q has no buffer")
	wantError(t, "short", call(p.q, wrong(func(m *gpu.Memory) { m.Len-- })), attn.ErrShape, "the rotated q has")
	other := attn.Float32
	if p.query == other {
		other = attn.BFloat16
	}
	x := m.Put(t, enginetest.Poisoned(p.q.Len, other), other)
	wantError(t, "type", call(p.q, x), attn.ErrDType, "q is "+p.query.String())
	if plan.FuseAppend(attn.InPlanes(p.k, p.v), func(*Appending) bool { return true }) {
		t.Error("a launch was offered to do what it does not know of")
	}
	plan.FuseAttention(p.operands(), func(a *Attending) bool { // this launch may rotate
		if !rotates(a.Problem) || a.Positions == 0 {
			t.Error("a launch is not told to turn")
		}
		return false
	})
	for _, spoil := range []func(r *attn.Rotary){
		func(r *attn.Rotary) { r.HeadDim++ },
		func(r *attn.Rotary) { r.Turns = "" },
		func(r *attn.Rotary) { r.Turns = attn.Turnings(strings.Repeat(string(r.Turns), p.Dim)) },
		func(r *attn.Rotary) { r.Factor = math.NaN() },
	} {
		g := p.geometry
		spoil(&g.Rotary)
		wantError(t, "problem", plan.Build(g, p.seqs, p.rows), attn.ErrShape, "")
	}
	m.Settle(t)
	if strings.Contains(lib.Log(), "kernel") {
		t.Error("a kernel was launched")
	}
	noError(t, rotated.Buffer.Close())
	noError(t, x.Buffer.Close())
	noError(t, plan.Close())
	p.close(t)
}

// BenchmarkGPUAppend measures storing new tokens, and rotating and storing them, between attention of 1024 keys: us of
// the two launches, in the shapes of Llama 3.2 1B and Llama 3 8B.
func BenchmarkGPUAppend(b *testing.B) {
	m := realGPU(b)
	for _, c := range []struct {
		name string
		dim  int
	}{{"1b", 64}, {"8b", 128}} {
		for _, rows := range []int{1, 16, 512} {
			b.Run(fmt.Sprintf("%s/rows%d", c.name, rows), func(b *testing.B) {
				const heads, kv, page, keys, launches = 32, 8, 16, 1024, 16
				d := c.dim
				g := attn.Problem{Heads: heads, KVHeads: kv, Dim: d, ValueDim: d, Pages: attn.Separate(attn.Float16, d, d, attn.PageStrides{Page: kv * page * d, Head: page * d, Row: d}, attn.PageStrides{}), PageTokens: page, Scale: 0.1, Mask: attn.Mask{Causal: true},
					Query: attn.Strides{Row: heads * d, Head: d}, Out: attn.Strides{Row: heads * d, Head: d},
				}
				g.Pages.Planes[1].At = g.Pages.Planes[0].At
				sequences, each := rows, 1 // one prompt of 512 rows
				if rows > 16 {
					sequences, each = 1, rows
				}
				var seqs []attn.Sequence
				for i := range sequences {
					s := attn.Sequence{Row: i * each, Queries: each, Keys: keys}
					for j := range keys / page {
						s.Pages = append(s.Pages, int32(j*sequences+i))
					}
					seqs = append(seqs, s)
				}
				memory := func(n int, dtype attn.DType) gpu.Memory {
					buffer, err := m.Dev.NewBuffer(int64(n * dtype.Size()))
					noError(b, err)
					noError(b, buffer.Set(0, 0, buffer.Len()))
					b.Cleanup(func() { noError(b, buffer.Close()) })
					return gpu.Memory{Buffer: buffer, DType: dtype, Len: n}
				}
				all := sequences * keys * kv * d
				o := Operands{Q: memory(rows*heads*d, attn.Float32), Out: memory(rows*heads*d, attn.Float32), Pages: attn.InPlanes(memory(all, attn.Float16), memory(all, attn.Float16))}
				rotated, newK, newV := memory(rows*heads*d, attn.Float32), memory(rows*kv*d, attn.Float32), memory(rows*kv*d, attn.Float32)
				var took [2][]float64
				var runs []func() float64
				for i := range took {
					g, o := g, o
					if i == 1 {
						g.Rotary = randomRotary(rand.New(rand.NewPCG(1, 2)), d)
					}
					plan := m.engine.NewPlan()
					noError(b, plan.Build(g, seqs, rows))
					noError(b, plan.Upload(m.Stream))
					graph, err := m.Stream.Capture(func() error {
						for range launches {
							var err error
							if of := o; i == 0 {
								err = errors.Join(plan.Append(m.Stream, o.Pages, newK, newV), plan.Run(m.Stream, &of))
							} else {
								of.Q = rotated
								err = errors.Join(plan.AppendRotated(m.Stream, o.Pages, newK, newV, o.Q, rotated, 0), plan.Run(m.Stream, &of))
							}
							if err != nil {
								return err
							}
						}
						return nil
					})
					noError(b, err)
					begin, err := m.Dev.NewEvent(true)
					noError(b, err)
					end, err := m.Dev.NewEvent(true)
					noError(b, err)
					runs = append(runs, func() float64 {
						noError(b, m.Stream.Launch(graph))
						noError(b, m.Stream.Record(begin))
						noError(b, m.Stream.Launch(graph))
						noError(b, m.Stream.Record(end))
						noError(b, m.Stream.Synchronize())
						t, err := end.Since(begin)
						noError(b, err)
						return float64(t.Nanoseconds()) / 1e3 / launches
					})
					b.Cleanup(func() { noError(b, graph.Close()); noError(b, plan.Close()) })
				}
				for range 15 {
					for i, run := range runs {
						took[i] = append(took[i], run())
					}
				}
				for i := range took {
					slices.Sort(took[i])
				}
				plain, with := took[0][7], took[1][7]
				fmt.Printf("%s: %.2f us, rotated %.2f, %.2f more\n", b.Name(), plain, with, with-plain)
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

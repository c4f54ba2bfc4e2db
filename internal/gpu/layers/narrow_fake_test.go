//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package layers

import (
	"math/rand/v2"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/weight"
)

// fakeNarrow is a decoder on a fake GPU, with the parameters of narrow kernels.
func fakeNarrow(t *testing.T, capability, sms, shared int) (m *machine, launches func() []enginetest.Launch, d *Engine) {
	m, lib, d := fakeDecoder(t, capability, sms, shared)
	s := lib.State()
	s.Argument("narrow_operands", int(unsafe.Sizeof(narrowOperandParams{})))
	s.Argument("narrow_", int(unsafe.Sizeof(narrowParams{})))
	return m, func() []enginetest.Launch { return enginetest.Launches(lib.Log()) }, d
}

// packedOf describes packed weights.
func packedOf(t *testing.T, f weight.Format, out, in int) *weight.Packed {
	t.Helper()
	p, err := weight.Packing(&weight.Matrix{Format: f, Len: out * in}, in)
	noError(t, err)
	return &p
}

// TestNarrowLaunches: each launch fits each GPU, every block has a unit, and at most as many as are allowed have parts of a tile.
func TestNarrowLaunches(t *testing.T) {
	for _, f := range enginetest.Fakes {
		t.Run(f.Name, func(t *testing.T) {
			_, _, d := fakeDecoder(t, f.Capability, max(f.SMs, 8), f.Shared)
			rng := rand.New(rand.NewPCG(3, uint64(f.Capability)))
			for range 2000 {
				of := enginetest.Pick(rng, packable()...)
				in, out, rows := of.Block()*(1+rng.IntN(20000)/of.Block()), 1+rng.IntN(20000), 1+rng.IntN(200)
				o := Linear{Rows: rows, In: in, RoundX: rng.IntN(2) == 0, Parts: []LinearPart{{Out: out, Packed: packedOf(t, of, out, in)}}}
				p, err := d.planNarrow(&o)
				noError(t, err)
				l := narrowLaunch{}
				columns, most := d.narrowPadded(p.rows*p.parts), 0
				fewer := func(kind int) bool { // columns than these have a kernel
					return kind > 0 && (columns <= narrowColumns[kind-1] && (!l.packed.Super || d.hasSuper(narrowColumns[kind-1])))
				}
				if len(p.few) == 1 {
					l, columns, most = p.few[0], p.rows*p.few[0].cut, p.few[0].ranks*attn.Ceil(out, fewShare)
				} else {
					l = p.groups[0].launches[0]
					most = l.tiles * narrowShares[l.kind]
					l.shared = l.stages*l.stage + narrowWord
				}
				switch {
				case p.rows < 1 || p.rows > rows || columns > narrowColumns[l.kind] || fewer(l.kind), l.of[l.kind] == nil,
					len(p.few)+len(p.groups) != 1 || len(p.few) == 1 && (f.Capability != groupCapability || columns > fewColumns || l.blocks%l.ranks != 0 || l.ranks > mostSplit || l.ranks > l.units || l.stages%fewTeams[l.kind] != 0),
					d.narrowGroups() && l.stages < fewLeast,
					l.stages < 2 || l.stages > max(narrowMostStages, fewStages) || l.shared > f.Shared,
					l.blocks < 1 || l.blocks > most || len(p.few) == 0 && (l.blocks > l.tiles*l.units || l.tiles*narrowTile < out),
					l.units*2 < l.packed.Chunks:
					t.Fatalf("%+v, %+v for %d rows of %d, %v of %d rows", p, l, rows, in, of, out)
				}
			}
		})
	}
}

// TestNarrowArguments: the launches of a layer have its memory, all rows once, and operands before weights.
func TestNarrowArguments(t *testing.T) {
	m, launches, d := fakeNarrow(t, 90, 132, 232448)
	const rows, in, half = 70, 96, 24
	packed := packedOf(t, weight.Int4_32, 2*half, in)
	o := Linear{Rows: rows, In: in, X: m.memory(t, attn.Float32, rows*in), Early: true}
	w, b := m.memory(t, attn.Float32, packed.Bytes/4), m.memory(t, attn.Float32, 2*half)
	for i := range 2 {
		p := LinearPart{W: w, B: b, Y: m.memory(t, attn.Float32, rows*half), Out: half, Packed: packed, First: i * half}
		p.B.Offset += int64(4 * i * half)
		p.B.Len = half
		o.Parts = append(o.Parts, p)
	}
	n, err := d.Scratch(&o)
	noError(t, err)
	o.Scratch = m.memory(t, attn.Float32, n)
	noError(t, d.Linear(m.Stream, &o))
	row := 0
	for _, l := range launches() {
		switch l.Kernel {
		case "narrow_operands":
			p := (*narrowOperandParams)(unsafe.Pointer(&l.Arg[0]))
			if p.x != o.X.Address()+uint64(4*row*in) || p.rows != int32(min(32, rows-row)) || p.parts != 2 || p.in != in || p.deep != 4 || p.operands != o.Scratch.Address() || p.tiles != 1 || p.sums != 0 || p.order != 0 {
				t.Errorf("rows from %d on: %+v", row, p)
			}
		case "narrow_hopper_int4_64", "narrow_hopper_int4_32":
			p := (*narrowParams)(unsafe.Pointer(&l.Arg[0]))
			if p.w != w.Address() || p.scales != w.Address()+uint64(packed.Scales) || p.second != w.Address()+uint64(packed.Second) || p.bias != b.Address() || p.out != 2*half || p.split != half ||
				p.y != o.Parts[0].Y.Address()+uint64(4*row*half) || p.y2 != o.Parts[1].Y.Address()+uint64(4*row*half) || p.early != 1 || p.fresh != 0b1111 || p.full != 0b1111 || p.shift != 0 || p.factor != 2 || p.x != o.Scratch.Address() {
				t.Errorf("rows from %d on: %+v", row, p)
			}
			row += int(p.rows)
		}
	}
	if row != rows {
		t.Errorf("%d rows in %+v", row, launches())
	}
	for text, change := range map[string]func(o *Linear){
		"packed weights of 48 rows of 96": func(o *Linear) { o.In, o.Rows = in/2, 2*rows },
		"rows [25, 49)":                   func(o *Linear) { o.Parts[1].First++ },
		"w has":                           func(o *Linear) { o.Parts[0].W.Len-- },
		"the scratch has 16 elements":     func(o *Linear) { o.Scratch.Len = 16 },
	} {
		wrong := o
		wrong.Parts = append([]LinearPart(nil), o.Parts...)
		change(&wrong)
		wantError(t, text, d.Linear(m.Stream, &wrong), attn.ErrShape, text)
	}
	table := Gather{Rows: 1, N: in, TableRows: half, Table: w, Packed: packed, IDs: m.memory(t, attn.Float32, 1), Y: m.memory(t, attn.Float32, in)}
	wantError(t, "a table of other rows", d.Gather(m.Stream, &table), attn.ErrShape, "packed with 48 rows of 96")
	if table.TableRows = 2 * half; d.NewGathers(&table) != nil {
		t.Error("a packed table is read together with another")
	}
	for _, x := range []gpu.Memory{o.X, o.Scratch, w, b, o.Parts[0].Y, o.Parts[1].Y, table.IDs, table.Y} {
		noError(t, x.Buffer.Close())
	}
}

// TestFewWork: the busiest cluster's stages and tiles, counted by hand.
func TestFewWork(t *testing.T) {
	for _, c := range []struct{ pieces, clusters, most, kind, stages, tiles int }{
		{448, 66, 32, 0, 56, 3}, // seven pieces: tiles of 1, 4 and 2, or of 4, 2 and 1
		{96, 16, 8, 0, 12, 2},   // six
		{64, 64, 4, 1, 1, 1},    // one, of two jobs
		{5, 5, 3, 0, 1, 1},      // three of a stage's four jobs
	} {
		if stages, tiles := fewWork(c.pieces, c.clusters, c.most, c.kind); stages != c.stages || tiles != c.tiles {
			t.Errorf("%+v: %d stages, %d tiles", c, stages, tiles)
		}
	}
}

// TestNarrowFew: few rows are launches by clusters, which have x itself and its order.
func TestNarrowFew(t *testing.T) {
	m, launches, d := fakeNarrow(t, 90, 132, 232448)
	const rows, in, out = 3, 8192, 8192
	packed := packedOf(t, weight.Int4_128, out, in)
	packed.Order, packed.Bytes = packed.Bytes, packed.Bytes+4*in
	o := Linear{Rows: rows, In: in, X: m.memory(t, attn.Float32, rows*in), Residual: m.memory(t, attn.Float32, rows*out)}
	o.Parts = []LinearPart{{W: m.memory(t, attn.Float32, packed.Bytes/4), Y: m.memory(t, attn.Float32, rows*out), Out: out, Packed: packed}}
	n, err := d.Scratch(&o)
	noError(t, err)
	if n != 0 {
		t.Errorf("a scratch of %d elements", n)
	}
	noError(t, d.Linear(m.Stream, &o))
	all := launches()
	if len(all) != 1 || all[0].Kernel != "narrow_hopper_integers_int4_16" || all[0].Cluster < 2 || all[0].Blocks%all[0].Cluster != 0 {
		t.Fatalf("%+v", all)
	}
	p := (*narrowParams)(unsafe.Pointer(&all[0].Arg[0]))
	w := &o.Parts[0].W
	if p.x != o.X.Address() || p.order != w.Address()+uint64(packed.Order) || p.scales != w.Address()+uint64(packed.Scales) || p.y != o.Parts[0].Y.Address() || p.residual != o.Residual.Address() ||
		p.rows != rows || p.parts != fewDigits || p.columns != fewDigits*rows || p.in != in || int(p.ranks) != all[0].Cluster || p.units != 64 || p.stage != 16384+2*512 || p.early != 0 || p.stages*p.stage > int32(all[0].Shared) {
		t.Errorf("%+v", p)
	}
	for _, x := range []gpu.Memory{o.X, o.Residual, *w, o.Parts[0].Y} {
		noError(t, x.Buffer.Close())
	}
}

//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package layers

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/weight"
)

func fakeDecoder(t *testing.T, capability, sms, shared int) (*machine, *fakedriver.Library, *Engine) {
	m, lib := fakeGPU(t, capability, sms, shared)
	return m, lib, loadDecoder(t, m)
}

func loadDecoder(t *testing.T, m *machine) *Engine {
	real := gpu.Image
	gpu.Image = func(string, int) ([]byte, error) { return []byte("image"), nil }
	defer func() { gpu.Image = real }()
	d, err := New(m.Dev)
	noError(t, err)
	return d
}

func (m *machine) memory(t *testing.T, d attn.DType, n int) gpu.Memory {
	return m.Put(t, make([]byte, n*d.Size()), d)
}

// Every launch fits the GPU, and the launches of a call take all rows once.
func TestLinearLaunches(t *testing.T) {
	for _, f := range enginetest.Fakes {
		t.Run(f.Name, func(t *testing.T) {
			_, _, d := fakeDecoder(t, f.Capability, max(f.SMs, 8), f.Shared)
			rng := rand.New(rand.NewPCG(7, uint64(f.Capability)))
			for range 3000 {
				element, rows, in, tiles := enginetest.Pick(rng, gpu.Types...), 1+rng.IntN(40), 8*(1+rng.IntN(2048)), 1+rng.IntN(2000)
				norm := rng.IntN(2) == 0
				l, ok, err := d.configureGEMV(d.gemv[element], weight.Dense(element), rows, in, tiles, norm)
				noError(t, err)
				if !ok && norm { // then it is a launch of its own
					l, ok, err = d.configureGEMV(d.gemv[element], weight.Dense(element), rows, in, tiles, false)
					noError(t, err)
				}
				if !ok {
					if in*4+70<<10 > f.Shared { // a row of float32 and the rings
						continue
					}
					t.Fatalf("no launch for %d rows of %d, w %v", rows, in, element)
				}
				all := attn.Ceil(in*element.Size(), 128)
				switch {
				case l.rows < 1 || l.rows > min(rows, gemvRows),
					l.split < 1 || l.split > min(8, all) || l.split > 1 && !d.overlap(),
					l.clusters < 1 || l.clusters > tiles || l.clusters*l.split > max(f.SMs, 8),
					l.shared > f.Shared,
					l.stages < 2 || !d.overlap() && l.stages != 2 && l.stages != 4:
					t.Fatalf("%+v for %d rows of %d, w %v, %d tiles, norm %v", l, rows, in, element, tiles, norm)
				}
			}
		})
	}
}

func TestLinearArguments(t *testing.T) {
	m, lib, d := fakeDecoder(t, 90, 132, 232448)
	const rows, in = 40, 64
	o := Linear{Rows: rows, In: in, X: m.memory(t, attn.Float32, rows*in), Activation: attn.ReLU, Early: true,
		Norm: &Norm{Gamma: m.memory(t, attn.Float32, in), Eps: 1e-5}}
	for _, out := range []int{100, 32} {
		o.Parts = append(o.Parts, LinearPart{W: m.memory(t, attn.Float32, out*in), B: m.memory(t, attn.Float32, out), Y: m.memory(t, attn.Float32, rows*out), Out: out})
	}
	if scratch, err := d.Scratch(&o); scratch != rows*in || err != nil {
		t.Fatalf("the norm of 40 rows needs a scratch of %d elements, %v", scratch, err)
	}
	o.Scratch = m.memory(t, attn.Float32, rows*in)
	lib.Forget()
	noError(t, d.Linear(m.Stream, &o))
	var list []enginetest.Launch
	for _, l := range enginetest.Launches(lib.Log()) {
		if l.Kernel == "linear_f32" {
			list = append(list, l)
		}
	}
	row := 0
	for _, l := range list {
		p := (*linearParams)(unsafe.Pointer(&l.Arg[0]))
		if p.x != o.Scratch.Address()+uint64(row*in*4) || p.y[1] != o.Parts[1].Y.Address()+uint64(row*32*4) || p.w[1] != o.Parts[1].W.Address() || p.b[0] != o.Parts[0].B.Address() || p.w[2] != 0 {
			t.Errorf("rows from %d on: %+v", row, p)
		}
		if p.norm != 0 || p.activation != 1 || p.early != 1 || p.in != in || p.tiles != [mostParts]int32{4, 5, 5} || p.out != [mostParts]int32{100, 32, 0} || l.Blocks%int(p.split) != 0 || l.Threads != 256 {
			t.Errorf("rows from %d on: %+v, %+v", row, p, l)
		}
		row += int(p.rows)
	}
	if row != rows || len(list) != 3 {
		t.Errorf("%d rows in %d launches", row, len(list))
	}
	for _, x := range []gpu.Memory{o.X, o.Scratch, o.Norm.Gamma, o.Parts[0].W, o.Parts[0].B, o.Parts[0].Y, o.Parts[1].W, o.Parts[1].B, o.Parts[1].Y} {
		noError(t, x.Buffer.Close())
	}
}

// someLinear is a Linear of 16-bit weights, and the memory that it uses.
func (m *machine) someLinear(t *testing.T, rng *rand.Rand, rows, in int) (o Linear, memory []gpu.Memory) {
	dtype := enginetest.Pick(rng, attn.Float16, attn.BFloat16)
	o = Linear{Rows: rows, In: in, X: m.memory(t, attn.Float32, rows*in), Activation: attn.Activation(rng.IntN(3)), Early: rng.IntN(2) == 0}
	memory = []gpu.Memory{o.X}
	if rng.IntN(2) == 0 {
		o.Norm = &Norm{Gamma: m.memory(t, attn.Float32, in), Eps: 1e-5}
		memory = append(memory, o.Norm.Gamma)
	}
	for range 1 + rng.IntN(mostParts) {
		out := 1 + rng.IntN(700)
		p := LinearPart{W: m.memory(t, dtype, out*in), B: m.memory(t, attn.Float32, out), Y: m.memory(t, attn.Float32, rows*out), Out: out}
		o.Parts = append(o.Parts, p)
		memory = append(memory, p.W, p.B, p.Y)
	}
	return o, memory
}

// The modules of GEMMs of hundreds of rows, and of kernels that round x, are loaded when some layer needs them, in a
// capture, too; what fails is tried again.
func TestModulesAreLoadedLate(t *testing.T) {
	m, lib := fakeGPU(t, 90, 132, 232448)
	var units []string
	defer func(real func(string, int) ([]byte, error)) { gpu.Image = real }(gpu.Image)
	gpu.Image = func(unit string, _ int) ([]byte, error) {
		units = append(units, unit)
		return []byte("image"), nil
	}
	d, err := New(m.Dev)
	noError(t, err)
	round := false
	linear := func(rows int) error {
		const in, out = 1024, 4096
		o := Linear{Rows: rows, In: in, X: m.memory(t, attn.Float32, rows*in), Parts: []LinearPart{{W: m.memory(t, attn.Float16, in*out), Y: m.memory(t, attn.Float32, rows*out), Out: out}}}
		o.Scratch = m.memory(t, attn.Float32, rows*in+rows)
		t.Cleanup(func() {
			for _, x := range []gpu.Memory{o.X, o.Parts[0].W, o.Parts[0].Y, o.Scratch} {
				noError(t, x.Buffer.Close())
			}
		})
		o.RoundX = round
		_, err := m.Stream.Capture(func() error { return d.Linear(m.Stream, &o) })
		return err
	}
	loaded := func() bool { return slices.Contains(units, gemmUnit) }
	if err := linear(persistentRows); err != nil || loaded() {
		t.Errorf("%d rows: %v, modules %q", persistentRows, err, units)
	}
	lib.Forget()
	if err := linear(4 * persistentRows); err != nil || !loaded() || !strings.Contains(lib.Log(), "gemm_f16_") {
		t.Errorf("%d rows: %v, modules %q", 4*persistentRows, err, units)
	}
	if slices.Contains(units, mixedUnit) {
		t.Errorf("nobody rounds x: modules %q", units)
	}
	round = true
	for _, rows := range []int{mostPrecise, mostPrecise + 1} {
		lib.Forget()
		rounds := rows > mostPrecise
		if err := linear(rows); err != nil || slices.Contains(units, mixedUnit) != rounds || strings.Contains(lib.Log(), "_rounded\n") != rounds {
			t.Errorf("%d rows in mixed precision: %v, modules %q, %s", rows, err, units, lib.Log())
		}
	}
	s := lib.State()
	for name, load := range map[string]func() (done bool, err error){
		"persistent": func() (bool, error) {
			_, err := d.persistentOf(weight.BFloat16, false)
			return d.gemm[attn.BFloat16].persistent[0] != nil, err
		},
		"rounded": func() (bool, error) {
			_, err := d.roundedOf(weight.BFloat16, false)
			return d.rounded[attn.BFloat16][0] != nil, err
		},
		"products": func() (bool, error) {
			_, err := d.hopperOf(attn.BFloat16)
			return d.hopper[attn.BFloat16] != nil, err
		},
		"rounded gates": func() (bool, error) {
			_, err := d.roundedOf(weight.BFloat16, true)
			return d.rounded[attn.BFloat16][1] != nil, err
		},
	} {
		failures := 0
		for i, done := int64(1), false; !done; i++ {
			s.FailWith, s.FailAt = 2, s.Calls+i
			var err error
			done, err = load()
			s.FailAt = 0
			if done != (err == nil) {
				t.Fatalf("%s, call %d: %v", name, i, err)
			}
			if err != nil {
				failures++
			}
		}
		if failures < 3 {
			t.Errorf("%s: %d failures", name, failures)
		}
	}
}

// A Linear of many rows is two launches: one makes operands of all rows, and the
// thread blocks of the other have all tiles once.
func TestMatrixLaunches(t *testing.T) {
	m, lib, d := fakeDecoder(t, 90, 132, 232448)
	const matrixWidth = gemmTile + 4 // floats between rows of a tile's sums
	rng := rand.New(rand.NewPCG(3, 4))
	persistent, clusters := 0, 0
	d.leftOut, d.leastHopper = []int{32, 64}, math.MaxInt
	for range 200 {
		rows, in := 17+rng.IntN(400), 8*(1+rng.IntN(300))
		o, memory := m.someLinear(t, rng, rows, in)
		o.RoundX = rng.IntN(2) == 0
		wantError(t, "no scratch", d.Linear(m.Stream, &o), attn.ErrShape, "the scratch has no buffer")
		scratch, err := d.Scratch(&o)
		noError(t, err)
		o.Scratch = m.memory(t, attn.Float32, scratch)
		memory = append(memory, o.Scratch)
		lib.Forget()
		noError(t, d.Linear(m.Stream, &o))
		list := enginetest.Launches(lib.Log())
		if len(list) != 2 || !strings.HasPrefix(list[0].Kernel, "matrix_operands_") {
			t.Fatalf("%d launches: %s", len(list), lib.Log())
		}
		ops, p := (*operandParams)(unsafe.Pointer(&list[0].Arg[0])), (*gemmParams)(unsafe.Pointer(&list[1].Arg[0]))
		least := int(ops.parts)*rows*in/2 + rows // and rows behind the last one, up to two tiles
		if list[0].Blocks != rows || ops.x != o.X.Address() || ops.lead != o.Scratch.Address() || ops.parts < 1 || ops.parts > 2 || scratch < least || scratch > least+256*in/2 || ops.factors != ops.lead+uint64(2*int(ops.parts)*rows*in) ||
			int(ops.n) != in || int(ops.rows) != rows || (ops.norm == 1) != (o.Norm != nil) || ops.beta != 0 {
			t.Fatalf("%d rows of %d: %+v, %+v", rows, in, *ops, list[0])
		}
		l := list[1]
		ends := strings.Split(l.Kernel, "_")
		each, err := strconv.Atoi(ends[2])
		noError(t, err)
		split, tiles := int(p.split), o.tilesOf(gemmTile)
		bad := false
		if ends[0] == "gemm" {
			tiles = o.tilesOf(each)
			stage := 128 * (int(ops.parts)*persistentRows + each)
			bad = rows < leastPersistent || split < 1 || split > 2 || l.Threads != persistentThreads || l.Blocks != split*min(132/split, tiles*attn.Ceil(rows, split*persistentRows)) ||
				l.Shared < int(p.stages)*(stage+16)+persistentStaging
			persistent++
		} else {
			beside := int(p.beside)
			bad = l.Blocks != attn.Ceil(tiles, beside)*beside*attn.Ceil(rows, each)*split || split < 1 || beside < 1 || split*beside > mostSplit || split > attn.Ceil(in, gemmStep) ||
				l.Threads != gemmThreads || l.Shared < int(p.stages)*(128*(gemmTile+int(ops.parts)*each)+16) || l.Shared < each*matrixWidth*4
			clusters++
		}
		bad = bad || (ops.parts == 1) != o.RoundX || (len(ends) == 4) != o.RoundX || o.RoundX && ends[3] != "rounded"
		if bad || l.Shared > 232448 || p.factors != ops.factors || int(p.rows) != rows || int(p.in) != in ||
			p.activation != int32(o.Activation) || (p.early == 1) != o.Early || int(p.tiles[mostParts-1]) != tiles {
			t.Fatalf("%d rows of %d: %+v, %+v", rows, in, *p, l)
		}
		for i := range o.Parts {
			if p.y[i] != o.Parts[i].Y.Address() || p.b[i] != o.Parts[i].B.Address() || int(p.out[i]) != o.Parts[i].Out {
				t.Fatalf("part %d: %+v", i, *p)
			}
		}
		// Closed weights are found before the operands are made.
		noError(t, o.Parts[0].W.Buffer.Close())
		lib.Forget()
		if err := d.Linear(m.Stream, &o); !isError(err, cuda.ErrClosed) || len(enginetest.Launches(lib.Log())) > 0 {
			t.Fatalf("closed weights: %v, %d launches", err, len(enginetest.Launches(lib.Log())))
		}
		for i := range memory {
			if memory[i].Buffer != o.Parts[0].W.Buffer {
				noError(t, memory[i].Buffer.Close())
			}
		}
	}
	if persistent == 0 || clusters == 0 {
		t.Errorf("%d persistent launches and %d others", persistent, clusters)
	}
}

// Which launch is best of some layers on a GPU of 132 multiprocessors.
func TestMatrixChoice(t *testing.T) {
	_, _, d := fakeDecoder(t, 90, 132, 232448)
	for _, c := range []struct {
		rows, in, out, parts int
		round                bool
		columns, blocks      int // of persistent launches; 0: another one
	}{
		{128, 4096, 4096, 1, true, 0, 0}, {512, 4096, 4096, 1, false, 128, 128}, {512, 4096, 4096, 1, true, 128, 128},
		{2048, 4096, 4096, 1, false, 256, 132}, {2048, 4096, 4096, 1, true, 256, 132}, {2048, 4096, 16384, 1, true, 256, 132}, {2048, 4096, 4096, 3, true, 256, 132},
		{2048, 2048, 2048, 1, false, 256, 128}, {2048, 2048, 2048, 1, true, 256, 128}, {2048, 2048, 8192, 1, true, 256, 132},
	} {
		o := Linear{Rows: c.rows, In: c.in, RoundX: c.round}
		for range c.parts {
			o.Parts = append(o.Parts, LinearPart{W: gpu.Memory{DType: attn.BFloat16}, Out: c.out})
		}
		l, err := d.configureGEMM(&o)
		noError(t, err)
		if c.columns == 0 && l.threads != gemmThreads || c.columns > 0 && (l.threads != persistentThreads || l.columns != c.columns || l.blocks*l.split != c.blocks || (l.parts == 1) != c.round) {
			t.Errorf("%+v: %+v", c, l)
		}
	}
}

// What can't be is no launch, and no scratch.
func TestScratchOfNothing(t *testing.T) {
	_, _, d := fakeDecoder(t, 90, 132, 232448)
	for _, o := range []Linear{
		{Rows: 500, In: 0, Parts: []LinearPart{{W: gpu.Memory{DType: attn.Float16}, Out: 64}}},
		{Rows: 500, In: -8, Parts: []LinearPart{{W: gpu.Memory{DType: attn.Float16}, Out: 64}}},
		{Rows: 0, In: 64, Parts: []LinearPart{{W: gpu.Memory{DType: attn.Float16}, Out: 64}}},
		{Rows: 500, In: 64},
	} {
		if n, err := d.Scratch(&o); n != 0 || err != nil {
			t.Errorf("%+v: %d, %v", o, n, err)
		}
	}
}

// Where shared memory is small, as on GPUs for desks, rings are shorter.
func TestMatrixOfSmallMemory(t *testing.T) {
	const most = 101376
	_, _, d := fakeDecoder(t, 120, 48, most)
	for _, rows := range []int{5, 16, 17, 33, 65, 500} {
		o := Linear{Rows: rows, In: 4096, Parts: []LinearPart{{W: gpu.Memory{DType: attn.Float16}, Out: 4096}}}
		if _, ok, err := d.configureSkinny(&o); ok || err != nil {
			t.Errorf("%d rows of a GPU that has no batches: %v, %v", rows, ok, err)
		}
		if l, err := d.configureGEMM(&o); err != nil || l.stages < 2 || l.shared > most || l.shared < l.rows*4*(gemmTile+4) || l.threads != gemmThreads {
			t.Errorf("%d rows: %+v, %v", rows, l, err)
		}
	}
}

// Where there are no clusters, thread blocks have whole tiles.
func TestLinearWithoutClusters(t *testing.T) {
	m, lib, d := fakeDecoder(t, 120, 48, 101376)
	for code, want := range map[int32]bool{912: true, 1: false} {
		lib.State().FailIn("cuOccupancyMaxActiveClusters", code)
		for _, rows := range []int{2, 20} {
			const in, out = 256, 64
			o := Linear{Rows: rows, In: in, X: m.memory(t, attn.Float32, rows*in), Scratch: m.memory(t, attn.Float32, 32*(in+1)),
				Parts: []LinearPart{{W: m.memory(t, attn.Float16, out*in), Y: m.memory(t, attn.Float32, rows*out), Out: out}}}
			lib.Forget()
			err := d.Linear(m.Stream, &o)
			if (err == nil) != want || err == nil && (len(enginetest.Launches(lib.Log())) == 0 || strings.Contains(lib.Log(), "\ncluster ")) {
				t.Errorf("%d rows, code %d: %v, %s", rows, code, err, lib.Log())
			}
			for _, x := range []gpu.Memory{o.X, o.Scratch, o.Parts[0].W, o.Parts[0].Y} {
				noError(t, x.Buffer.Close())
			}
		}
		d.clusters.Clear()
	}
}

// A Linear of a batch's rows is one launch of clusters, behind a launch for operands if the kind is ready. The clusters have all tiles once, and
// shared memory for what they are told: more than half, so that no two of its blocks
// are on one multiprocessor, but where they have little to read.
func TestBatchLaunches(t *testing.T) {
	const most = 232448
	m, lib, d := fakeDecoder(t, 90, 132, most)
	rng := rand.New(rand.NewPCG(5, 6))
	d.slower = math.Inf(1) // tiles are not asked
	for range 200 {
		rows, in := leastSkinny+rng.IntN(enginetest.Pick(rng, 16, 64, mostSkinny)-leastSkinny+1), 8*(1+rng.IntN(enginetest.Pick(rng, 30, 300, 2200)))
		if rows > 16 { // slices of wider ones need not fit
			in = min(in, 8192)
		}
		if 2*rows > mostSkinny { // and tiles are faster
			in = min(in, 2048)
		}
		o, memory := m.someLinear(t, rng, rows, in)
		o.RoundX = rng.IntN(2) == 0
		tiles := o.tilesOf(skinnyTile)
		scratch, err := d.Scratch(&o)
		noError(t, err)
		ready := scratch > 0
		if ready {
			if scratch != rows*in/2+rows || !o.RoundX || rows <= mostTogether {
				t.Fatalf("%d rows of %d: a scratch of %d elements", rows, in, scratch)
			}
			o.Scratch = m.memory(t, attn.Float32, scratch)
			memory = append(memory, o.Scratch)
		}
		lib.Forget()
		noError(t, d.Linear(m.Stream, &o))
		list := enginetest.Launches(lib.Log())
		if ready {
			p := (*operandParams)(unsafe.Pointer(&list[0].Arg[0]))
			if !strings.HasPrefix(list[0].Kernel, "matrix_operands_") || p.x != o.X.Address() || p.lead != o.Scratch.Address() || p.parts != 1 || (p.norm == 1) != (o.Norm != nil) {
				t.Fatalf("%+v, %+v", list[0], p)
			}
			list = list[1:]
		}
		if len(list) != 1 || !strings.HasPrefix(list[0].Kernel, "batch_") {
			t.Fatalf("%d launches: %s", len(list), lib.Log())
		}
		l, p, each := list[0], (*skinnyParams)(unsafe.Pointer(&list[0].Arg[0])), 0
		name, rounded := strings.CutSuffix(l.Kernel, "_rounded")
		name, wide := strings.CutSuffix(name, "_wide")
		if _, err := fmt.Sscanf(name[strings.LastIndex(name, "_")+1:], "%d", &each); err != nil {
			t.Fatal(err)
		}
		split, clusters := int(p.split), l.Blocks/int(p.split)
		below := attn.Ceil(rows, each)
		blocks, mine := attn.Ceil(attn.Ceil(in, skinnyBlock), split), 2*skinnyTile*each
		if o.Norm != nil && !ready {
			mine = max(mine, 32*each+2*blocks*skinnyBlock)
		}
		ring, operands := int(p.stages)*skinnyStage, blocks*each*256
		if rounded { // operands of one part take half as much, and floats what is missing of the ring
			operands /= 2
			if registers := map[int]int{32: 8, 64: 4}[each]; !ready && blocks > registers && operands > ring {
				t.Fatalf("%d rows of %d: %d bytes of floats, and %d stages: %+v", rows, in, 2*operands, p.stages, l)
			}
		}
		needs := skinnyFixed + ring + operands + 4*(2*skinnyTile*each+mine)
		little := attn.Ceil(below*tiles*split, 132)*blocks*skinnyStage/2 <= skinnyLittle
		switch {
		case below > 1 && each < 32 || below > mostBeside || clusters%below != 0 || each > 2*rows && each > skinnyKinds[0].rows, rounded != (o.RoundX && rows > 16),
			split < 2 || split > mostSkinnySplit || split&(split-1) != 0 || l.Blocks%split != 0 || !strings.Contains(lib.Log(), fmt.Sprintf("cluster %d 1 1\n", split)),
			clusters < 1 || clusters > tiles*below || l.Blocks > 132,
			p.stages < 2 || p.stages < 3 && each <= 16 || l.Threads != 9*32+64*max(1, each/16) || l.Shared < needs || l.Shared > most || !little && 2*l.Shared <= most,
			p.linearParams.x != o.X.Address() || int(p.rows) != rows || int(p.in) != in || int(p.tiles[mostParts-1]) != tiles,
			ready != (rounded && each == 64), wide != (!ready && blocks > map[int]int{8: 16, 16: 8, 32: 4, 64: 4}[each]),
			p.activation != int32(o.Activation) || (p.early == 1) != o.Early || (p.norm == 1) != (o.Norm != nil && !ready):
			t.Fatalf("%d rows of %d: %+v, %+v", rows, in, p.linearParams, l)
		}
		for i := range o.Parts {
			if p.y[i] != o.Parts[i].Y.Address() || p.b[i] != o.Parts[i].B.Address() || int(p.out[i]) != o.Parts[i].Out {
				t.Fatalf("part %d: %+v", i, p.linearParams)
			}
		}
		closed := memory[rng.IntN(len(memory))]
		noError(t, closed.Buffer.Close())
		lib.Forget()
		if err := d.Linear(m.Stream, &o); !isError(err, cuda.ErrClosed) || len(enginetest.Launches(lib.Log())) > 0 {
			t.Fatalf("closed memory: %v, %d launches", err, len(enginetest.Launches(lib.Log())))
		}
		for i := range memory {
			if memory[i].Buffer != closed.Buffer {
				noError(t, memory[i].Buffer.Close())
			}
		}
	}

	// Rows too wide for a slice of them in shared memory are a matrix, and so are too many.
	for _, o := range []Linear{{Rows: 16, In: 1 << 16}, {Rows: 64, In: 1 << 15}, {Rows: 65, In: 1 << 14}, {Rows: mostSkinny + 1, In: 64}} {
		o.Parts = []LinearPart{{W: gpu.Memory{DType: attn.Float16}, Out: 64}}
		if l, err := d.choose(&o); l.skinny != nil || err != nil || l.gemm == nil {
			t.Errorf("%d rows of %d: %+v, %v", o.Rows, o.In, l, err)
		}
	}
}

// Which clusters are best for some layers of an H200, as was measured in whole steps: of
// two, four, eight and sixteen blocks, as many as run at once there.
func TestBatchCost(t *testing.T) {
	alone, beside := [...]int{66, 30, 15, 7}, [...]int{66, 33, 16, 8}
	for _, c := range []struct {
		rows, in, out, best int
		atOnce              [4]int
	}{
		{4, 768, 2304, 4, beside}, {8, 768, 2304, 4, beside}, {16, 768, 2304, 8, beside}, {16, 768, 768, 8, beside},
		{4, 768, 3072, 4, beside}, {16, 768, 3072, 4, beside}, {4, 1024, 3072, 4, beside},
		{4, 2048, 6144, 4, alone}, {8, 2048, 8192, 4, alone}, {16, 2048, 6144, 8, alone}, {16, 8192, 2048, 16, alone},
		{8, 2560, 10240, 4, alone}, {4, 4096, 12288, 8, alone}, {16, 4096, 16384, 8, alone}, {8, 16384, 4096, 8, alone}, {16, 16384, 4096, 16, alone},
	} {
		best, least := 0, 0.0
		for i, split := range skinnySplits {
			l := skinnyLaunch{kind: 0, split: split, below: 1, stages: mostSkinnyStages}
			if c.rows > skinnyKinds[0].rows {
				l.kind = 1
			}
			tiles := c.out / skinnyTile
			l.clusters = min(c.atOnce[i], tiles)
			if cost := l.cost(tiles, 1, attn.Ceil(c.in/skinnyBlock, split)); best == 0 || cost < least {
				best, least = split, cost
			}
		}
		if best != c.best {
			t.Errorf("%d rows, %d x %d: clusters of %d, want %d", c.rows, c.out, c.in, best, c.best)
		}
	}
}

// What may not be done at once is not one launch.
func TestGathersApart(t *testing.T) {
	m, lib, d := fakeDecoder(t, 90, 132, 232448)
	const rows, n, of = 2, 8, 7
	table, other := m.memory(t, attn.Float16, of*n), m.memory(t, attn.Float32, of*n)
	ids, ids2 := m.memory(t, attn.Float32, rows), m.memory(t, attn.Float32, rows)
	residual, y, sum := m.memory(t, attn.Float32, rows*n), m.memory(t, attn.Float32, rows*n), m.memory(t, attn.Float32, rows*n)
	longer := m.memory(t, attn.Float32, of*n)
	first := Gather{Rows: rows, N: n, TableRows: of, Table: table, IDs: ids, Residual: residual, Y: y}
	good := func() Gather {
		return Gather{Rows: rows, N: n, TableRows: of, Table: other, IDs: ids2, Residual: y, Y: sum}
	}
	for name, c := range map[string]struct {
		first, then func(*Gather)
		want        bool
	}{
		"as they are":                      {nil, nil, true},
		"ids of both":                      {nil, func(o *Gather) { o.IDs = ids }, true},
		"another residual":                 {nil, func(o *Gather) { o.Residual = residual }, false},
		"none":                             {nil, func(o *Gather) { o.Residual = gpu.Memory{} }, false},
		"fewer rows":                       {nil, func(o *Gather) { o.Rows = 1 }, false},
		"half a row":                       {nil, func(o *Gather) { o.N = 4 }, false},
		"wrong":                            {nil, func(o *Gather) { o.TableRows = 8 }, false},
		"onto its residual":                {nil, func(o *Gather) { o.Y = y }, false},
		"onto the first's residual":        {nil, func(o *Gather) { o.Y = residual }, false},
		"a table that the first one makes": {func(o *Gather) { o.Y = longer }, func(o *Gather) { o.Table, o.Residual = longer, longer }, false},
	} {
		a, b := first, good()
		if c.first != nil {
			c.first(&a)
		}
		if c.then != nil {
			c.then(&b)
		}
		g := d.NewGathers(&a)
		if g == nil {
			t.Fatalf("%s: the first one is none", name)
		}
		lib.Forget()
		if got := g.Then(&b); got != c.want {
			t.Errorf("%s: one launch %v, want %v", name, got, c.want)
		}
		noError(t, g.Queue(m.Stream))
		if n := strings.Count(lib.Log(), "kernel decoder_gather\n"); n != 1 {
			t.Errorf("%s: %d launches", name, n)
		}
		noError(t, g.Upload())
		noError(t, g.Close())
	}
	for _, x := range []gpu.Memory{table, other, ids, ids2, residual, y, sum, longer} {
		noError(t, x.Buffer.Close())
	}
}

// What is wrong is said before anything is queued.
func TestDecoderRefuses(t *testing.T) {
	m, lib, d := fakeDecoder(t, 90, 132, 232448)
	x, w, y := m.memory(t, attn.Float32, 32), m.memory(t, attn.Float16, 48), m.memory(t, attn.Float32, 6)
	half := m.memory(t, attn.Float16, 64)
	good := func() Linear {
		return Linear{Rows: 2, In: 16, X: x, Parts: []LinearPart{{W: w, Y: y, Out: 3}}}
	}
	gated := func(o *Linear) { o.Gate, o.Activation, o.Parts = true, attn.SiLU, append(o.Parts, o.Parts[0]) }
	lib.Forget()
	for name, c := range map[string]struct {
		change func(*Linear)
		want   error
		text   string
	}{
		"rows":            {func(o *Linear) { o.Rows = 0 }, attn.ErrShape, "0 rows"},
		"activation":      {func(o *Linear) { o.Activation = attn.Activations }, attn.ErrShape, "Activation(5)"},
		"no layers":       {func(o *Linear) { o.Parts = nil }, attn.ErrShape, "0 layers"},
		"four layers":     {func(o *Linear) { o.Parts = make([]LinearPart, 4) }, attn.ErrShape, "4 layers"},
		"x too short":     {func(o *Linear) { o.Rows = 3 }, attn.ErrShape, "x has 32 elements of 48"},
		"x of float16":    {func(o *Linear) { o.X = half }, attn.ErrDType, "x is float16"},
		"w of float64":    {func(o *Linear) { o.Parts[0].W.DType = attn.Float64 }, attn.ErrDType, "w is float64"},
		"w too short":     {func(o *Linear) { o.Parts[0].Out = 4 }, attn.ErrShape, "w has 48 elements of 64"},
		"odd rows":        {func(o *Linear) { o.In = 12 }, attn.ErrShape, "a multiple of 8"},
		"no y":            {func(o *Linear) { o.Parts[0].Y = gpu.Memory{} }, attn.ErrShape, "y has no buffer"},
		"b of float16":    {func(o *Linear) { o.Parts[0].B = half }, attn.ErrDType, "b is float16"},
		"residual":        {func(o *Linear) { o.Residual = x; o.Residual.Len = 5 }, attn.ErrShape, "the residual has 5 elements of 6"},
		"two residuals":   {func(o *Linear) { o.Parts = append(o.Parts, o.Parts[0]); o.Residual = x }, attn.ErrShape, "a residual of 2 layers"},
		"types of layers": {func(o *Linear) { p := o.Parts[0]; p.W.DType = attn.BFloat16; o.Parts = append(o.Parts, p) }, attn.ErrDType, "of layer 0 float16"},
		"eps":             {func(o *Linear) { o.Norm = &Norm{Eps: math.NaN()} }, attn.ErrShape, "eps is NaN"},
		"gamma":           {func(o *Linear) { o.Norm = &Norm{Gamma: y} }, attn.ErrShape, "gamma has 6 elements of 16"},
		"beta of RMS":     {func(o *Linear) { o.Norm = &Norm{RMS: true, Beta: x} }, attn.ErrShape, "beta of a norm by the root mean square"},
		"1+gamma":         {func(o *Linear) { o.Norm = &Norm{UnitOffset: true} }, attn.ErrShape, "1+gamma"},
		"no scratch":      {gated, attn.ErrShape, "the scratch has no buffer"},
		"short scratch":   {func(o *Linear) { gated(o); o.Scratch = y }, attn.ErrShape, "the scratch has 6 elements of 16"},
		"over a residual": {func(o *Linear) { o.Activation, o.Residual = attn.SiLU, y }, attn.ErrUnsupported, "the residual is overwritten"},
		"memory's place":  {func(o *Linear) { o.X.Offset += 4; o.X.Len = 32 }, attn.ErrShape, "x"},
	} {
		o := good()
		c.change(&o)
		d.separateGates = name == "over a residual" || strings.HasSuffix(name, "scratch") // without kernels that do both
		wantError(t, name, d.Linear(m.Stream, &o), c.want, c.text)
	}
	d.separateGates = false
	wide := Linear{Rows: 2, In: 128, X: m.memory(t, attn.Float32, 16*128)}
	for range 2 {
		wide.Parts = append(wide.Parts, LinearPart{W: m.memory(t, attn.Float16, 3*128), Y: m.memory(t, attn.Float32, 16*3), Out: 3})
	}
	for name, change := range map[string]func(*Linear){
		"nothing": func(o *Linear) {},
		"RMS":     func(o *Linear) { o.Norm = &Norm{RMS: true} },
		"SiLU":    func(o *Linear) { o.Activation = attn.SiLU },
	} {
		o := wide
		change(&o)
		if c := d.NewMegakernel(); c == nil || c.Linear(&o) != (name != "SiLU") {
			t.Errorf("a megakernel, and a layer with %s", name)
		}
		o.Rows = 16
		if p := d.NewProjection(&o); (p != nil) != (name != "SiLU") {
			t.Errorf("a projection, and a layer with %s", name)
		}
	}
	wantError(t, "norm", d.Norm(m.Stream, 2, 17, x, x, &Norm{}), attn.ErrShape, "x has 32 elements of 34")
	wantError(t, "gather", d.Gather(m.Stream, &Gather{Rows: 2, N: 8, TableRows: 7, Table: w, IDs: y, Y: x}), attn.ErrShape, "the table has 48 elements of 56")
	if d.NewGathers(&Gather{Rows: 2, N: 8, TableRows: 7, Table: w, IDs: y, Y: x}) != nil {
		t.Error("a table that is too short waits to be gathered")
	}
	wantError(t, "gather ids", d.Gather(m.Stream, &Gather{Rows: 7, N: 2, TableRows: 7, Table: w, IDs: y, Y: x}), attn.ErrShape, "the ids has 6 elements of 7")
	if n := len(enginetest.Launches(lib.Log())); n != 0 {
		t.Errorf("%d launches", n)
	}
	o := good()
	noError(t, w.Buffer.Close())
	if err := d.Linear(m.Stream, &o); !isError(err, cuda.ErrClosed) {
		t.Errorf("closed weights: %v", err)
	}
	for _, b := range []gpu.Memory{x, y, half} {
		noError(t, b.Buffer.Close())
	}
}

// Of more than 64 rows of 8192 columns, in one part of 16384, a skinny GEMM has no room for its ring: tiles take them.
// In one part they take what costs them less, too.
func TestBatchOfWideRows(t *testing.T) {
	_, _, d := fakeDecoder(t, 90, 132, 232448)
	for _, c := range []struct {
		rows, in, out, parts int
		skinny, rounded      bool // which in two parts, and which in one
	}{
		{128, 2048, 2048, 3, false, false}, {128, 2048, 2048, 1, true, true}, {128, 2048, 8192, 1, false, false}, {128, 8192, 2048, 1, false, true},
		{128, 10240, 2560, 1, false, false}, {128, 16384, 4096, 1, false, false}, {128, 768, 3072, 1, true, true},
		{64, 4096, 4096, 3, false, true}, {64, 4096, 4096, 1, true, true}, {64, 4096, 16384, 1, false, true}, {64, 8192, 2048, 1, true, true}, {64, 16384, 4096, 1, false, false},
	} {
		o := Linear{Rows: c.rows, In: c.in}
		for range c.parts {
			o.Parts = append(o.Parts, LinearPart{W: gpu.Memory{DType: attn.Float16}, Out: c.out})
		}
		for _, round := range []bool{false, true} {
			o.RoundX = round
			want := map[bool]bool{false: c.skinny, true: c.rounded}[round]
			l, err := d.choose(&o)
			if ok := l.skinny != nil; ok != want || err != nil || (l.parts() == 1) != round {
				t.Errorf("%+v, rounded %v: a skinny GEMM %v of %d parts, %v", c, round, ok, l.parts(), err)
			}
		}
	}
}

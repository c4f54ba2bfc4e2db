package gpu

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/half"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

const (
	tableLinear = "Linear layers of many rows"

	roundedName = ours + ", mixed precision"
)

// linearCase is a linear layer: y = x W^T + b.
type linearCase struct {
	rows, in, out    int
	rounded, precise *measure.Bar // times as fast as cuBLAS
}

// linearCases are the layers of OPT-6.7b and OPT-1.3b, of a chunk of a prompt and of steps of many sequences.
func linearCases() (cases []linearCase) {
	for _, rows := range []int{2048, 512, 256, 128, 64, 32} {
		for _, s := range [][2]int{{4096, 4096}, {4096, 16384}, {16384, 4096}, {2048, 2048}, {2048, 8192}, {8192, 2048}} {
			c := linearCase{rows: rows, in: s[0], out: s[1]}
			if rows == 2048 && max(s[0], s[1]) >= 4096 && min(s[0], s[1]) == 4096 {
				c.rounded, c.precise = measure.AtLeast(0.80), measure.AtLeast(0.42)
			}
			cases = append(cases, c)
		}
	}
	return cases
}

func (c *linearCase) String() string { return fmt.Sprintf("%d x %d to %d", c.rows, c.in, c.out) }

func (c *linearCase) flops() float64 { return 2 * float64(c.rows) * float64(c.in) * float64(c.out) }

// linearLayers are those that take turns in a graph: weights come from memory as in a decoder.
const linearLayers = 8

// linearOperands is the operands of a case.
type linearOperands struct {
	engine          *layers.Engine
	x, w, b, y      gpu.Memory
	hostX, hostW    []float64
	hostB           []float64
	scratch         gpu.Memory
	buffers         []interface{ Close() error }
	weightsOfALayer int64 // bytes
}

func (r *linearOperands) close() (err error) {
	for _, b := range r.buffers {
		err = errors.Join(err, b.Close())
	}
	return err
}

func (d *gpuDevice) newLinearOperands(engine *layers.Engine, c *linearCase) (r *linearOperands, err error) {
	r = &linearOperands{engine: engine, weightsOfALayer: 2 * int64(c.in) * int64(c.out)}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	memory := func(dtype attn.DType, n int) (m gpu.Memory) {
		if err != nil {
			return m
		}
		m = gpu.Memory{DType: dtype, Len: n}
		if m.Buffer, err = d.dev.NewBuffer(int64(n * dtype.Size())); err == nil {
			r.buffers = append(r.buffers, m.Buffer)
		}
		return m
	}
	r.x, r.w, r.b, r.y = memory(attn.Float32, c.rows*c.in), memory(attn.Float16, linearLayers*c.in*c.out), memory(attn.Float32, c.out), memory(attn.Float32, c.rows*c.out)
	scratch := 0
	for _, round := range []bool{false, true} {
		if err == nil {
			var n int
			n, err = engine.Scratch(r.layer(c, 0, round))
			scratch = max(scratch, n)
		}
	}
	r.scratch = memory(attn.Float32, max(scratch, 1))
	if err != nil {
		return r, err
	}
	if r.hostX, err = d.fill(&r.x, 1); err != nil {
		return r, err
	}
	if r.hostW, err = d.fill(&r.w, 1/math.Sqrt(float64(c.in))); err != nil {
		return r, err
	}
	r.hostB, err = d.fill(&r.b, 1)
	return r, err
}

// layer is the operands of layer i.
func (r *linearOperands) layer(c *linearCase, i int, round bool) *layers.Linear {
	w := r.w
	w.Offset, w.Len = int64(i)*r.weightsOfALayer, c.in*c.out
	return &layers.Linear{Rows: c.rows, In: c.in, X: r.x, Parts: []layers.LinearPart{{W: w, B: r.b, Y: r.y, Out: c.out}}, Scratch: r.scratch, RoundX: round, Early: true}
}

// linear is ours of a case. Its output is compared before anything is timed.
func (d *gpuDevice) linear(name string, r *linearOperands, c *linearCase, round bool) (*Contender, error) {
	one, err := d.contender(name, linearLayers, func(i int) error { return r.engine.Linear(d.stream, r.layer(c, i, round)) })
	if err != nil || d.unchecked {
		return one, err
	}
	return one, r.verify(d, one, c, round)
}

// verify compares elements of the last layer with sums in float64.
func (r *linearOperands) verify(d *gpuDevice, one *Contender, c *linearCase, round bool) error {
	if err := r.y.Buffer.Set(0, 0xff, r.y.Buffer.Len()); err != nil {
		return err
	}
	if _, err := one.Replay(1); err != nil {
		return err
	}
	tolerance := 1e-4
	if round {
		tolerance = 2e-2
	}
	const columns = 16
	for _, row := range []int{0, c.rows - 1, d.rng.IntN(c.rows)} {
		first := d.rng.IntN(c.out - columns + 1)
		want := make([]float64, columns)
		for j := range want {
			want[j] = r.hostB[(first+j)%len(r.hostB)]
			for i := range c.in {
				want[j] += r.hostX[(row*c.in+i)%len(r.hostX)] * r.hostW[((linearLayers-1)*c.in*c.out+(first+j)*c.in+i)%len(r.hostW)]
			}
		}
		got, err := rowOf(&r.y, row*c.out+first, columns)
		if err != nil {
			return err
		}
		if err := compareRow(got, want, tolerance); err != nil {
			return fmt.Errorf("%s: row %d, from column %d on: %w", one.Name, row, first, err)
		}
	}
	return nil
}

// fillPeriod is after how many elements numbers repeat: no row is as another one near it.
const fillPeriod = 1<<20 + 61*8

// fill fills m with random numbers of a standard deviation, and returns the first ones.
func (d *gpuDevice) fill(m *gpu.Memory, deviation float64) ([]float64, error) {
	n := min(fillPeriod, m.Len)
	numbers, bytes := make([]float64, n), make([]byte, n*m.DType.Size())
	for i := range numbers {
		x := float32(deviation * d.rng.NormFloat64())
		if m.DType == attn.Float16 {
			h := half.FromFloat32(x)
			*(*half.Float16)(unsafe.Pointer(&bytes[2*i])) = h
			x = h.Float32()
		} else {
			*(*float32)(unsafe.Pointer(&bytes[4*i])) = x
		}
		numbers[i] = float64(x)
	}
	for at := int64(0); at < m.Buffer.Len(); at += int64(len(bytes)) {
		if err := m.Buffer.Upload(at, bytes[:min(int64(len(bytes)), m.Buffer.Len()-at)]); err != nil {
			return nil, err
		}
	}
	return numbers, nil
}

// layersOfRows measures linear layers of many rows.
func (b *Bench) layersOfRows() (err error) {
	cases := linearCases()
	if b.linear != nil {
		cases = b.linear
	}
	if m := b.Options.match; m != nil {
		cases = slices.DeleteFunc(cases, func(c linearCase) bool { return !m.MatchString(c.String()) })
	}
	if len(cases) == 0 {
		return errors.New("there is no such shape (-match)")
	}
	engine, err := layers.New(b.Device.dev)
	if err != nil {
		return err
	}
	if err := b.Device.Fill(clockShape.rotation(), ArenaPeriod); err != nil {
		return err
	}
	b.Note("weights of float16, x and y of float32 for us and of float16 for PyTorch, whose product is cuBLAS's; ours has the launch that makes operands of x in it")
	b.Clock("before")
	b.Report.WriteHead(b.Stdout)
	said := len(b.Report.Notes)
	var failed []error
	for i, c := range cases {
		fmt.Fprintf(b.Stderr, "%d of %d: %s\n", i+1, len(cases), &c)
		if err := b.measureLinear(engine, &c); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", &c, err))
			fmt.Fprintln(b.Stderr, failed[len(failed)-1])
		}
		if err := b.save(); err != nil {
			return err
		}
	}
	b.Report.WriteTable(b.Stdout, tableLinear)
	b.Clock("after")
	if notes := b.Report.Notes[said:]; len(notes) > 0 {
		fmt.Fprintf(b.Stdout, "\n- %s\n", strings.Join(notes, "\n- "))
	}
	b.Report.WriteVerdict(b.Stdout)
	return errors.Join(failed...)
}

func (b *Bench) measureLinear(engine *layers.Engine, c *linearCase) (err error) {
	r, err := b.Device.newLinearOperands(engine, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	var all []*Contender
	defer func() { err = errors.Join(err, CloseAll(all)) }()
	for _, round := range []bool{false, true} {
		name := ours
		if round {
			name = roundedName
		}
		one, err := b.Device.linear(name, r, c, round)
		if one != nil {
			all = append(all, one)
		}
		if err != nil {
			return err
		}
	}
	all = append(all, b.peers.linear(c)...)
	times, err := Alternate(prefillRounds, linearLayers, all)
	if err != nil {
		return err
	}
	cublas := slices.IndexFunc(all, func(x *Contender) bool { return x.Name == peerNames["cublas"] })
	for i, x := range all {
		t := &times[i]
		row := b.Report.Row(tableLinear, c.String(), x.Name)
		row.Add(measure.Micros, 1e6*quantile(t.Replays, 0.5), nil)
		row.Add(measure.TFLOPs, c.flops()/t.Rounds.Median()/1e12, nil)
		if cublas >= 0 && i != cublas {
			bar := c.precise
			if x.Name == roundedName {
				bar = c.rounded
			}
			row.Add(measure.OverCuBLAS, t.Rounds.Faster(times[cublas].Rounds), bar)
		}
	}
	return nil
}

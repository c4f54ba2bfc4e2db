package paper

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// open is the bench of the device that the flags name, or of what there is.
func (o *options) open(stdout, stderr io.Writer) (bench, error) {
	switch o.device {
	case "cpu":
		return o.openCPU(stdout, stderr)
	case "gpu":
		return o.openGPU(stdout, stderr)
	case "":
		driver, err := gpu.LoadDriver()
		if err == nil {
			_, err = driver.Info(0)
		}
		if err != nil {
			fmt.Fprintf(stderr, "no GPU is used: %v\n", err)
			return o.openCPU(stdout, stderr)
		}
		return o.openGPU(stdout, stderr)
	}
	return nil, fmt.Errorf("-device %q is neither gpu nor cpu", o.device)
}

// gpuBench measures on a GPU.
type gpuBench struct {
	*gpu.Bench
	o          *options
	began      bool  // there is memory to read
	none       error // why there is no counter of energy
	noCounters bool  // of how busy it is

	scaling *gpu.Scaling // nil: not yet
	scaled  point        // which it measures

	whole   wholeDecoder
	wholeOf string // the panel that it is of; none yet
	noWhole error  // why there is none
}

func (o *options) openGPU(stdout, stderr io.Writer) (bench, error) {
	m, err := measure.ThisMachine(runtime.GOMAXPROCS(0))
	if err != nil {
		return nil, err
	}
	python := o.python
	if python == "" {
		python = "python3"
	}
	b := &gpuBench{Bench: gpu.NewBench(gpu.Options{Python: python, Peers: o.peers}, m, stdout, stderr), o: o}
	b.Report.Command = "paper"
	if unchecked {
		b.Unchecked()
	}
	if err := b.Open(); err != nil {
		return nil, err
	}
	b.none = b.OpenPower()
	return b, nil
}

// unchecked is for tests, whose kernels compute nothing.
var unchecked = false

func (b *gpuBench) report() *measure.Report { return b.Report }

func (b *gpuBench) close() (err error) {
	if b.scaling != nil {
		err = b.scaling.Close()
	}
	err = errors.Join(err, b.closeWhole())
	return errors.Join(err, b.Close())
}

// shape is a point's in float16.
func (x point) shape() gpu.Shape {
	if x.even() {
		return gpu.EvenShape(len(x.lengths), x.heads, x.kvHeads, x.lengths[0], x.dim)
	}
	name, _ := strings.CutSuffix(x.label, fmt.Sprintf(", %d heads of %d", x.heads, x.dim)) // which it adds
	name, _ = strings.CutSuffix(name, fmt.Sprintf(", %d/%d heads of %d", x.heads, x.kvHeads, x.dim))
	return gpu.RaggedShape(name, x.heads, x.kvHeads, x.dim, x.lengths)
}

// points leaves out what there is no memory for.
func (b *gpuBench) points(p panel) (points []point, seconds []float64) {
	if p.kind == scale || p.kind == whole {
		return p.gpu, repeat(b.costs(p), len(p.gpu)) // they say it themselves
	}
	largest, err := b.Largest()
	left := 0
	for _, x := range p.gpu {
		s := x.shape()
		if err == nil && s.Region() > largest {
			left++
			continue
		}
		points, seconds = append(points, x), append(seconds, b.cost(p, s))
	}
	if left > 0 {
		b.Note("%s: for %d of its shapes there is no memory", p.table, left)
	}
	return points, seconds
}

// costs is about how long a point takes that is no launch alone.
func (b *gpuBench) costs(p panel) float64 {
	if p.kind == whole {
		return 30
	}
	return 8
}

// cost is about how long a shape takes, in seconds.
func (b *gpuBench) cost(p panel, s gpu.Shape) float64 {
	const contenders, bytesASecond = 9, 3e12
	graph := max(float64(s.Bytes())/bytesASecond, 6e-6) * float64(s.Launches())
	turns := float64(contenders * b.rounds())
	if p.kind == energy {
		return 1 + energyContenders*gpu.EnergySeconds()*b.part()
	}
	return 1.5 + turns*max(2*graph, 0.006)
}

func repeat(v float64, n int) (all []float64) {
	for range n {
		all = append(all, v)
	}
	return all
}

func (b *gpuBench) rounds() int {
	if b.o.Quick {
		return 3
	}
	return 7
}

// begin takes memory for the largest shape.
func (b *gpuBench) begin(all []item) error {
	var shapes []gpu.Shape
	for _, x := range all {
		if x.panel.kind != scale && x.panel.kind != whole {
			shapes = append(shapes, x.point.shape())
		}
	}
	if len(all) == 0 {
		return nil
	}
	if err := b.Arenas(shapes); err != nil {
		return err
	}
	b.began = true
	b.Clock("before")
	return nil
}

func (b *gpuBench) end() {
	if b.began {
		b.Clock("after")
	}
}

func (b *gpuBench) measure(p panel, x point) error {
	switch p.kind {
	case energy:
		return b.measureEnergy(p, x)
	case scale:
		return b.measureScale(p, x)
	case whole:
		return b.measureWhole(p, x)
	}
	return b.measureSpeed(p, x)
}

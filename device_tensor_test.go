package leanattention_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	denses "gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// deviceTests run on any GPU: on the fake one of the tests, and in gpu_test.go on
// a real one.
func deviceTests(runs int) map[string]func(*testing.T, *device.GPU) {
	return map[string]func(*testing.T, *device.GPU){
		"Tensor":      testDeviceTensor,
		"Value":       testDeviceValue,
		"Errors":      testDeviceTensorErrors,
		"Nodes":       testDeviceNodes,
		"NodeValues":  testDeviceNodeValues,
		"NodeErrors":  testDeviceNodeErrors,
		"MemoryFlat":  func(t *testing.T, gpu *device.GPU) { testDeviceMemoryFlat(t, gpu, runs) },
		"Garbage":     testDeviceGarbage,
		"Concurrency": testDeviceConcurrent,
		"Clones":      testDeviceClones,
		"Shared":      testDeviceShared,
	}
}

// randomTensor is n random bits of an element type, NaN among them.
func randomTensor(rng *rand.Rand, dt tensor.Dtype, shape ...int) *tensor.Dense {
	n := tensor.Shape(shape).TotalSize()
	var backing any
	switch dt {
	case tensor.Int32:
		x := make([]int32, n)
		for i := range x {
			x[i] = int32(rng.Uint32())
		}
		backing = x
	case la.Float16:
		x := make([]la.F16, n)
		for i := range x {
			x[i] = la.F16(rng.Uint32())
		}
		backing = x
	case la.BFloat16:
		x := make([]la.BF16, n)
		for i := range x {
			x[i] = la.BF16(rng.Uint32())
		}
		backing = x
	default:
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(rng.NormFloat64())
		}
		backing = x
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(backing))
}

// sameElements compares two tensors on the host, bit for bit.
func sameElements(a, b *tensor.Dense) error {
	if a.Dtype() != b.Dtype() || !a.Shape().Eq(b.Shape()) {
		return fmt.Errorf("%v %v and %v %v", a.Dtype(), a.Shape(), b.Dtype(), b.Shape())
	}
	same := false
	if a.Dtype().Size() == 4 {
		same = slices.Equal(denses.Elements[uint32](a), denses.Elements[uint32](b))
	} else {
		same = slices.Equal(denses.Elements[uint16](a), denses.Elements[uint16](b))
	}
	if !same {
		return errors.New("elements differ")
	}
	return nil
}

var deviceTypes = []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16, tensor.Int32}

func testDeviceTensor(t *testing.T, gpu *device.GPU) {
	rng := reftest.Rand(t)
	shapes := [][]int{{1}, {3, 5}, {2, 3, 4}, {1, 1, 7, 2}, {300_001}, {4, 700, 999}}
	if reftest.RaceEnabled {
		shapes = shapes[:4]
	}
	for _, dt := range deviceTypes {
		for _, shape := range shapes {
			x := randomTensor(rng, dt, shape...)
			d := graphtest.Upload(t, gpu, x)
			if d.GPU() != gpu || d.Dtype() != dt || !d.Shape().Eq(x.Shape()) || d.Size() != x.Shape().TotalSize() {
				t.Fatalf("%v of %v", d, x.Shape())
			}
			c, err := d.Clone()
			if err != nil {
				t.Fatal(err)
			}
			y := randomTensor(rng, dt, shape...)
			if err := c.(*device.Tensor).CopyFrom(graphtest.Upload(t, gpu, y)); err != nil {
				t.Fatal(err)
			}
			for _, err := range []error{sameElements(graphtest.Download(t, d), x), sameElements(graphtest.Download(t, c.(G.Value)), y)} {
				if err != nil {
					t.Fatalf("%v %v: %v", dt, shape, err)
				}
			}
			zero := c.(*device.Tensor).ZeroValue()
			if err := sameElements(graphtest.Download(t, zero), tensor.New(tensor.Of(dt), tensor.WithShape(shape...))); err != nil {
				t.Fatalf("zero of %v %v: %v", dt, shape, err)
			}
			if err := d.Free(); err != nil {
				t.Fatal(err)
			}
			if _, err := d.Download(); !errors.Is(err, la.ErrClosed) || !strings.Contains(err.Error(), "freed") {
				t.Fatalf("Download of a freed tensor: %v", err)
			}
			if err := d.Free(); !errors.Is(err, la.ErrClosed) {
				t.Fatalf("second Free: %v", err)
			}
		}
	}
	// What does not lie in rows is laid in rows.
	x := randomTensor(rng, la.Float16, 5, 7)
	if err := x.T(); err != nil {
		t.Fatal(err)
	}
	got := graphtest.Download(t, graphtest.Upload(t, gpu, x))
	if err := x.Transpose(); err != nil {
		t.Fatal(err)
	}
	if err := sameElements(got, x); err != nil {
		t.Errorf("transposed: %v", err)
	}
}

// testDeviceValue: what Gorgonia asks of a value, and what it must not get.
func testDeviceValue(t *testing.T, gpu *device.GPU) {
	d, err := gpu.NewTensor(la.BFloat16, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	if d.Data() != nil || d.Uintptr() != 0 || d.MemSize() != 0 {
		t.Error("the host is offered memory that it cannot read")
	}
	want := "BFloat16 (2, 3) on " + gpu.String()
	if got := fmt.Sprintf("%v", d); got != want {
		t.Errorf("printed as %q, want %q", got, want)
	}
	if !G.ValueEq(d, d) {
		t.Error("not equal to itself")
	}
	g := G.NewGraph()
	n := G.NewMatrix(g, la.BFloat16, G.WithShape(2, 3), G.WithName("x"), G.WithValue(d))
	if n.Value() != G.Value(d) {
		t.Error("WithValue has not bound it")
	}
	f, err := gpu.NewTensor(tensor.Float32, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(2, 3), G.WithName("f"), G.WithValue(f))
	sum := G.Must(G.Add(x, x))
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	if err := vm.RunAll(); err == nil {
		t.Errorf("Gorgonia's Add made %v of it", sum.Value())
	}
}

func testDeviceTensorErrors(t *testing.T, gpu *device.GPU) {
	const most = min(1<<42, math.MaxInt/8)
	f64 := tensor.New(tensor.Of(tensor.Float64), tensor.WithShape(2))
	for _, c := range []struct {
		name string
		err  error
		want error
	}{
		{"nil", second(gpu.Upload(nil)), la.ErrShape},
		{"float64", second(gpu.Upload(f64)), la.ErrDType},
		{"float64", second(gpu.NewTensor(tensor.Float64, 2)), la.ErrDType},
		{"size 0", second(gpu.NewTensor(tensor.Float32, 2, 0)), la.ErrShape},
		{"negative size", second(gpu.NewTensor(tensor.Float32, -1)), la.ErrShape},
		{"huge", second(gpu.NewTensor(tensor.Float32, math.MaxInt/2+1, 8)), la.ErrShape},
		{"too large", second(gpu.NewTensor(tensor.Float32, most)), la.ErrOutOfMemory},
		{"zero tensor", second(new(device.Tensor).Download()), la.ErrState},
		{"zero tensor", new(device.Tensor).Free(), la.ErrState},
		{"no GPU", second(new(device.GPU).Upload(f64)), la.ErrDType},
		{"no GPU", second(new(device.GPU).NewTensor(tensor.Float32, 1)), la.ErrState},
		{"no GPU", new(device.GPU).Synchronize(), la.ErrState},
		{"nil GPU", second((*device.GPU)(nil).NewTensor(tensor.Float32, 1)), la.ErrState},
	} {
		if !errors.Is(c.err, c.want) || !strings.HasPrefix(c.err.Error(), "leanattention: ") {
			t.Errorf("%s: %v, want %v", c.name, c.err, c.want)
		}
	}
	on := func(g *device.GPU, dt tensor.Dtype, shape ...int) *device.Tensor {
		d, err := g.NewTensor(dt, shape...)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	again, err := device.Open(gpu.Members()[0].Ordinal)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	d := on(gpu, tensor.Float32, 2, 3)
	for _, c := range []struct {
		from any
		want error
		text string
	}{
		{on(gpu, tensor.Int32, 2, 3), la.ErrDType, "from int32 to float32"},
		{on(gpu, tensor.Float32, 3, 2), la.ErrShape, "from (3, 2) to (2, 3)"},
		{on(again, tensor.Float32, 2, 3), la.ErrUnsupported, "opened a second time"},
		{new(device.Tensor), la.ErrUnsupported, "*device.Tensor"},
		{f32(3, 2).tensor(), la.ErrShape, "from (3, 2) to (2, 3)"},
		{tensor.New(tensor.Of(tensor.Float64), tensor.WithShape(2, 3)), la.ErrDType, "from float64 to float32"},
		{1.5, la.ErrUnsupported, "float64"},
		{nil, la.ErrUnsupported, "nil"},
	} {
		if err := d.CopyFrom(c.from); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("CopyFrom %v: %v, want %v with %q", c.from, err, c.want, c.text)
		}
	}
	if err := d.CopyFrom(d); err != nil {
		t.Errorf("CopyFrom itself: %v", err)
	}
	host := f32(2, 3).tensor()
	if err := d.CopyFrom(host); err != nil {
		t.Errorf("CopyFrom a tensor of the host: %v", err)
	}
	if back, err := d.Download(); err != nil || !slices.Equal(back.Data().([]float32), host.Data().([]float32)) {
		t.Errorf("CopyFrom a tensor of the host gave %v, %v", back, err)
	}
	if err := second(gpu.NewTensor(tensor.Float32, most)); err == nil || !strings.Contains(err.Error(), fmt.Sprint(4*int64(most))) {
		t.Errorf("does not say how many bytes: %v", err)
	}
}

func second[T any](_ T, err error) error { return err }

// testDeviceMemoryFlat: runs take no memory after the first.
func testDeviceMemoryFlat(t *testing.T, gpu *device.GPU, runs int) {
	g := G.NewGraph()
	r := newDeviceRelay(t, g, gpu, tensor.Float32, 16, 64)
	other, err := device.ToGPU(r.back, gpu)
	if err != nil {
		t.Fatal(err)
	}
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	graphtest.Let(t, r.x, randomTensor(reftest.Rand(t), tensor.Float32, 16, 64))
	graphtest.Again(t, vm)
	before, err := gpu.Memory()
	if err != nil {
		t.Fatal(err)
	}
	for range runs {
		graphtest.Again(t, vm)
	}
	after, err := gpu.Memory()
	const staging = 8 << 16 // how much is on its way at once depends on the GPU's pace
	if err != nil || after.Used != before.Used || after.Pinned > before.Pinned+staging {
		t.Errorf("%+v after the first run, %+v after %d: %v", before, after, runs, err)
	}
	if err := sameElements(graphtest.Download(t, other.Value()), r.x.Value().(*tensor.Dense)); err != nil {
		t.Error(err)
	}
}

// testDeviceGarbage: tensors that nobody frees come back when they are garbage.
func testDeviceGarbage(t *testing.T, gpu *device.GPU) {
	x := randomTensor(reftest.Rand(t), tensor.Float32, 1000)
	before, err := gpu.Memory()
	if err != nil {
		t.Fatal(err)
	}
	most := before.Used
	rounds := 200
	if reftest.RaceEnabled {
		rounds = 30
	}
	for range rounds {
		for range 10 {
			graphtest.Upload(t, gpu, x)
		}
		runtime.GC()
		m, err := gpu.Memory()
		if err != nil {
			t.Fatal(err)
		}
		most = max(most, m.Used)
	}
	if most > before.Used+200*4096 {
		t.Errorf("%d bytes in use before, up to %d for tensors of 4096 that nobody has", before.Used, most)
	}
}

// testDeviceConcurrent: goroutines use one GPU.
func testDeviceConcurrent(t *testing.T, gpu *device.GPU) {
	rng := reftest.Rand(t)
	errs := make(chan error)
	const workers = 4
	size := 200_000
	if reftest.RaceEnabled {
		size = 5000
	}
	for range workers {
		rng := rand.New(rand.NewPCG(rng.Uint64(), 0))
		go func() {
			errs <- func() error {
				for range 50 {
					x := randomTensor(rng, deviceTypes[rng.IntN(4)], 1+rng.IntN(size))
					d, err := gpu.Upload(x)
					if err != nil {
						return err
					}
					c, err := d.Clone()
					if err != nil {
						return err
					}
					if err := d.Free(); err != nil {
						return err
					}
					y, err := c.(*device.Tensor).Download()
					if err != nil {
						return err
					}
					if err := sameElements(x, y); err != nil {
						return err
					}
				}
				return nil
			}()
		}()
	}
	var all []error
	for range workers {
		all = append(all, <-errs)
	}
	if err := errors.Join(all...); err != nil {
		t.Error(err)
	}
}

func TestDeviceOnFakeDriver(t *testing.T) {
	runs := reftest.Cases(t, 2000, 20_000)
	if reftest.RaceEnabled {
		runs = 500
	}
	for name, test := range deviceTests(runs) {
		t.Run(name, func(t *testing.T) {
			gpu, _ := la.FakeGPU(t)
			test(t, gpu)
		})
	}
}

// TestDeviceClosed: everything of a closed GPU says so.
func TestDeviceClosed(t *testing.T) {
	gpu, _ := la.FakeGPU(t)
	x := f32(2, 2).tensor()
	d := graphtest.Upload(t, gpu, x)
	g := G.NewGraph()
	r := newDeviceRelay(t, g, gpu, tensor.Float32, 2, 2)
	graphtest.Let(t, r.x, x)
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	graphtest.Again(t, vm)
	if err := gpu.Close(); err != nil {
		t.Fatal(err)
	}
	_, clone := d.Clone()
	for name, err := range map[string]error{
		"Download":    second(d.Download()),
		"Free":        d.Free(),
		"Clone":       clone,
		"CopyFrom":    d.CopyFrom(d),
		"Upload":      second(gpu.Upload(x)),
		"NewTensor":   second(gpu.NewTensor(tensor.Float32, 1)),
		"Synchronize": gpu.Synchronize(),
		"ToDevice":    second(device.ToGPU(r.x, gpu)),
		"a run":       second(r.there.Op().Do(x)),
		"ToHost":      second(r.back.Op().Do(d)),
		"node value":  second(r.there.Value().(*device.Tensor).Download()),
	} {
		if !errors.Is(err, la.ErrClosed) || !strings.Contains(err.Error(), "the GPU") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if d.ZeroValue() != G.Value(d) || d.GPU() != gpu {
		t.Error("a tensor of a closed GPU is another")
	}
}

// TestDeviceOutOfMemory: what nobody has any more is given back to the driver
// before a request fails, and a request that fails changes nothing.
func TestDeviceOutOfMemory(t *testing.T) {
	gpu, lib := la.FakeGPU(t)
	lib.State().Total = 1 << 20
	for n := range 40 { // all sizes, so that no buffer serves twice
		d, err := gpu.NewTensor(tensor.Float32, 1000*(n+60))
		if err != nil {
			t.Fatal(err)
		}
		if n%2 == 0 { // the others are garbage
			if err := d.Free(); err != nil {
				t.Fatal(err)
			}
		}
	}
	kept := graphtest.Upload(t, gpu, f32(1000).tensor())
	before, _ := gpu.Memory()
	_, err := gpu.NewTensor(tensor.Float32, 1<<18)
	if !errors.Is(err, la.ErrOutOfMemory) || !strings.Contains(err.Error(), "1048576 bytes asked for") || !strings.Contains(err.Error(), "of 1048576 free") {
		t.Errorf("got %v", err)
	}
	if after, err := gpu.Memory(); err != nil || after.Used > before.Used {
		t.Errorf("%+v before, %+v after: %v", before, after, err)
	}
	if err := sameElements(graphtest.Download(t, kept), f32(1000).tensor()); err != nil {
		t.Error(err)
	}
}

// TestDeviceLargeUpload: several goroutines bring the pieces of a large tensor, all of
// them, and none is left where one fails.
func TestDeviceLargeUpload(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	pieces := 2                           // of a million elements
	data := make([]float32, pieces<<20+3) // and some
	for i := range data {
		data[i] = float32(i * 7 % 1000003)
	}
	x := tensor.New(tensor.WithBacking(data), tensor.WithShape(len(data)))
	before := runtime.NumGoroutine()
	there := func(gpu *device.GPU) error {
		d, err := gpu.Upload(x)
		if err != nil {
			return err
		}
		y, err := d.Download()
		if err != nil {
			return errors.Join(err, d.Free())
		}
		if !slices.Equal(y.Data().([]float32), data) {
			t.Error("something else has come down")
		}
		return d.Free()
	}
	deviceFaults(t, func(t *testing.T, gpu *device.GPU, lib *fakedriver.Library) error {
		err := there(gpu)
		if err == nil {
			return nil
		}
		if err := there(gpu); err != nil { // a fault is no end
			t.Errorf("again: %v", err)
		}
		return err
	})
	// A goroutine whose work has been waited for is counted until it has run to its
	// end, which a busy machine may put off.
	for began := time.Now(); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
		if time.Since(began) > 20*time.Second {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
	}
}

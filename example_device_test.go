package leanattention_test

import (
	"fmt"
	"log"
	"slices"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// A cache on a GPU, and a graph whose values are in host memory but for those of
// the attention. It is compiled and not run: machines have none or one.
func Example_device() {
	gpu, err := device.Open(0)
	if err != nil {
		log.Fatal(err) // ErrNoDevice if there is no GPU
	}
	defer gpu.Close()
	cache, err := leanattention.NewCache(leanattention.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 64, DType: leanattention.Float16, Pages: 16, Device: gpu})
	if err != nil {
		log.Fatal(err)
	}
	defer cache.Close()
	step, err := cache.NewStep(1)
	if err != nil {
		log.Fatal(err)
	}

	g := G.NewGraph()
	in := func(name string, width int) *G.Node {
		x := G.NewMatrix(g, tensor.Float32, G.WithShape(1, width), G.WithName(name), G.WithInit(G.Ones()))
		return G.Must(device.ToGPU(x, gpu)) // or leave x where it is: then out is in host memory too
	}
	out, err := leanattention.CachedAttention(in("q", 4*64), in("k", 2*64), in("v", 2*64), step.Layer(0), leanattention.WithCausal())
	if err != nil {
		log.Fatal(err)
	}
	out = G.Must(device.ToHost(out))

	sequence, err := cache.NewSequence()
	if err != nil {
		log.Fatal(err)
	}
	machine := G.NewTapeMachine(g)
	defer machine.Close()
	for range 3 {
		if err := step.Run([]leanattention.Append{{Seq: sequence, Tokens: 1}}, machine.RunAll); err != nil {
			log.Fatal(err)
		}
		machine.Reset()
	}
	fmt.Println(out.Value().Shape(), sequence.Len(), cache.Config().Device)
}

// A decode step is recorded when it has run once, and from then on queued as one. It is
// compiled here; where there is a GPU, or one of the tests', it runs.
func ExampleGPU_Record() {
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	gpu, err := device.Open(0)
	check(err)
	defer gpu.Close()
	cache, err := leanattention.NewCache(leanattention.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, DType: leanattention.Float16, Pages: 16, Device: gpu})
	check(err)
	defer cache.Close()
	step, err := cache.NewStep(1)
	check(err)
	sequence, err := cache.NewSequence()
	check(err)
	row := func(x float32) *tensor.Dense {
		return tensor.New(tensor.WithShape(1, 64), tensor.WithBacking(slices.Repeat([]float32{x}, 64)))
	}

	input, err := gpu.Upload(row(0))
	check(err)
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(1, 64), G.WithName("x"), G.WithValue(input))
	out, err := leanattention.CachedAttention(x, x, x, step.Layer(0), leanattention.WithCausal())
	check(err)
	machine := G.NewTapeMachine(g)
	defer machine.Close()

	var recording *device.Recording
	defer func() { check(recording.Close()) }()
	for i := range 4 {
		check(input.CopyFrom(row(float32(i)))) // the machine reads it, and so does a replay
		check(step.Run([]leanattention.Append{{Seq: sequence, Tokens: 1}}, func() (err error) {
			run := func() error {
				defer machine.Reset()
				return leanattention.Cause(machine.RunAll())
			}
			if i == 0 {
				return run() // nodes get their memory
			}
			if i == 1 {
				if recording, err = gpu.Record(run); err != nil {
					return err
				}
			}
			return recording.Replay() // Record has not executed the work
		}))
	}
	result, err := out.Value().(*device.Tensor).Download() // what the last replay computed
	check(err)
	fmt.Println(result.Shape(), sequence.Len())
}

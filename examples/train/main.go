// Command train trains a model of one decoder layer on a small text, by a graph that is written by hand: model.go. The command
// trains twice from the same seed, with attention made of Gorgonia's own ops (default) and with leanattention's node (lean), and
// prints the losses, which are equal, and the bytes that a step of each allocates, which are not. With a GPU, the command compares
// host memory with the GPU, where attention and the products of layers have 16 bits. The program is short enough to be copied.
//
//	go run ./examples/train -device gpu -save model
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"runtime"
	"time"

	G "gorgonia.org/gorgonia"
	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
)

// trained is the size of the trained model, and onGPU on a GPU, where heads have at least 64 elements. contexts are the contexts whose
// memory is measured, with the same model and one sequence.
var (
	trained  = size{batch: 8, context: 64, heads: 4, dim: 64, hidden: 128}
	onGPU    = size{batch: 8, context: 64, heads: 2, dim: 128, hidden: 256}
	contexts = []int{128, 256, 512, 1024}
)

func main() {
	steps := flag.Int("steps", 300, "training `steps`, at least 1")
	seed := flag.Uint64("seed", 1, "`number` that chooses the weights and the pieces of the text")
	where := flag.String("device", "cpu", "`where` to train: cpu, or gpu, which is compared with cpu")
	save := flag.String("save", os.DevNull, "`file` for the second model, lean or gpu, at the end")
	resume := flag.String("resume", os.DevNull, "`file` of an earlier -save, from which both models go on")
	flag.Parse()
	if *steps < 1 || *where != "cpu" && *where != "gpu" || flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "-steps is %d, and must be at least 1; -device is %q, and must be cpu or gpu; the arguments are %q, and must be none\n", *steps, *where, flag.Args())
		os.Exit(2)
	}
	if err := run(*steps, *seed, *where == "gpu", *resume, *save, os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// run trains twice from one seed, and writes the losses and times. Without a GPU, run also writes what a step allocates.
func run(steps int, seed uint64, gpu bool, resume, save string, out io.Writer) (err error) {
	s, names, kinds := trained, [2]string{"default", "lean"}, [2]kind{{attend: la.Default}, {attend: la.Attention}}
	if gpu {
		d, err := device.Open(0)
		if err != nil {
			return err
		}
		defer d.Close()
		s, names, kinds = onGPU, [2]string{"cpu", "gpu"}, [2]kind{{attend: la.Attention}, {attend: la.Attention, half: true, gpu: d}}
	}
	from, err := os.ReadFile(resume)
	if err != nil {
		return err
	}
	var courses [2]course
	for i, k := range kinds {
		k.from = from
		if courses[i], err = train(k, s, steps, seed); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "loss, nats a character\n  step%10s%10s\n", names[0], names[1])
	a, b, most := courses[0], courses[1], 0.0
	for i, loss := range a.losses {
		most = max(most, math.Abs(loss-b.losses[i]))
		if i%10 == 0 || i == steps-1 {
			fmt.Fprintf(out, "%6d%10.4f%10.4f\n", i+1, loss, b.losses[i])
		}
	}
	fmt.Fprintf(out, "    ms%10.1f%10.1f  a step\nthe losses differ by %.2g at most\n", a.milliseconds, b.milliseconds, most)
	if err := os.WriteFile(save, b.end.Bytes(), 0o666); err != nil || gpu {
		return err
	}
	fmt.Fprintf(out, "\nmemory, MiB that a step allocates\ncontext   default      lean\n")
	for _, n := range contexts {
		s.batch, s.context = 1, n
		for i, k := range kinds {
			if courses[i], err = train(k, s, 2, 1); err != nil { // the first step also allocates what all steps share
				return err
			}
		}
		fmt.Fprintf(out, "%7d%10.1f%10.1f\n", n, courses[0].mib, courses[1].mib)
	}
	return nil
}

// course is the course of a training.
type course struct {
	losses            []float64    // of each step
	milliseconds, mib float64      // of a step, on average; that the last step allocates
	end               bytes.Buffer // a checkpoint, and behind it the state of the random numbers
}

// train trains a new model, or from an earlier end on.
func train(k kind, s size, steps int, seed uint64) (c course, err error) {
	m, err := newModel(k, s, seed)
	if err != nil {
		return c, err
	}
	defer m.machine.Close()
	if b := bytes.NewBuffer(k.from); len(k.from) > 0 {
		if err := errors.Join(m.solver.Load(b, G.NodesToValueGrads(m.weights)), m.source.UnmarshalBinary(b.Bytes())); err != nil {
			return c, err
		}
	}
	var before, after runtime.MemStats
	begin := time.Now()
	for range steps {
		runtime.ReadMemStats(&before)
		loss, err := m.step()
		if err != nil {
			return c, err
		}
		c.losses = append(c.losses, loss)
	}
	runtime.ReadMemStats(&after)
	c.milliseconds, c.mib = time.Since(begin).Seconds()*1e3/float64(steps), float64(after.TotalAlloc-before.TotalAlloc)/(1<<20)
	state, _ := m.source.MarshalBinary() // has no error
	err = m.solver.Save(&c.end, G.NodesToValueGrads(m.weights))
	c.end.Write(state)
	return c, err
}

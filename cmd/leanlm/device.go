package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/ranks"
)

// parseDevice returns the numbers of the GPUs of -device; nil: the CPU.
func parseDevice(name string) (gpus []int, err error) {
	switch numbers, numbered := strings.CutPrefix(name, "gpu:"); {
	case name == "cpu" || name == "":
		return nil, nil
	case name == "gpu":
		return []int{0}, nil
	case numbered:
		for _, number := range strings.Split(numbers, ",") {
			i, err := strconv.Atoi(number)
			if err != nil || i < 0 {
				return nil, usagef("-device %q: %q is no number of a GPU", name, number)
			}
			if slices.Contains(gpus, i) {
				return nil, usagef("-device %q has GPU %d twice", name, i)
			}
			gpus = append(gpus, i)
		}
		return gpus, nil
	}
	return nil, usagef("-device %q is none of cpu, gpu, gpu:N, gpu:N,M", name)
}

// mayDiffer lists flags that may differ between ranks. The texts and models that the flags name are compared, or the flags change
// no text.
var mayDiffer = []string{"m", "p", "f", "prompts", "json-schema", "device", "stats", "json"}

// together is what a command computes, for the other ranks: the flags that must be alike, and texts by their names.
type together struct {
	flags *flags
	texts map[string]string
}

// same lists what all ranks must have alike.
func (t *together) same(model *opened) (list []string, err error) {
	t.flags.VisitAll(func(f *flag.Flag) {
		if _, first := t.flags.aliases[f.Name]; first && !slices.Contains(mayDiffer, f.Name) {
			list = append(list, fmt.Sprintf("-%s %s", f.Name, f.Value))
		}
	})
	for _, name := range slices.Sorted(maps.Keys(t.texts)) {
		list = append(list, name+": "+brief(t.texts[name]))
	}
	sums, err := model.Checksums()
	return append(list, sums...), err
}

// brief returns a text, or the beginning of a long text with its length and checksum.
func brief(text string) string {
	const most, shown = 60, 30
	if len(text) <= most {
		return text
	}
	return fmt.Sprintf("%s... (%d bytes, %08x)", text[:shown], len(text), crc32.Checksum([]byte(text), crc32.MakeTable(crc32.Castagnoli)))
}

// join connects the process to the other ranks of the environment, if there are any. The command uses the returned context and
// streams from then on: ranks above 0 write only errors, and an interrupt ends all ranks.
func (m *modelFlags) join(ctx context.Context, model *opened, t together, std streams) (context.Context, streams, error) {
	if model.world.Size <= 1 {
		return ctx, std, nil
	}
	same, err := t.same(model)
	if err != nil {
		return ctx, std, err
	}
	fmt.Fprintf(std.err, "waiting for %d ranks at %s\n", model.world.Size, model.world.Address)
	comm, err := ranks.Join(ctx, model.gpu, model.world, same...)
	if err != nil {
		return ctx, std, err
	}
	fmt.Fprintf(std.err, "rank %d of %d on %v\n", model.world.Rank, model.world.Size, model.gpu)
	model.comm, m.options.Ranks = comm, comm
	model.stop = context.AfterFunc(ctx, func() { comm.Fail(context.Cause(ctx)) })
	if model.world.Rank > 0 {
		std.out, std.err = io.Discard, io.Discard
	}
	return context.Background(), std, nil
}

// openDevice opens the GPUs of -device, or that of the rank.
func (m *modelFlags) openDevice(world ranks.World) (*device.GPU, error) {
	gpus, err := parseDevice(m.device)
	switch {
	case err != nil, m.device == "": // a command that computes nothing
		return nil, err
	case m.options.Shard != la.ShardAuto && len(gpus) < 2:
		return nil, usagef("-shard needs several GPUs, as -device gpu:0,1")
	case world.Size > 1 && gpus == nil:
		return nil, usagef("WORLD_SIZE is %d, and -device is cpu: ranks compute on GPUs, which -device gpu names", world.Size)
	case gpus == nil:
		return nil, nil
	case world.Size > 1 && m.device == "gpu":
		return world.OpenGPU()
	}
	return device.Open(gpus...)
}

// end is Close after err, which may be nil and which the other ranks are told.
func (o *opened) end(err error) error {
	if o.comm != nil && err != nil {
		o.comm.Fail(err)
	}
	return errors.Join(err, o.Close())
}

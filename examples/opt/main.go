// Command opt continues texts with an OPT model, decoded by Gorgonia with
// leanattention as the attention operator.
//
//	go run gorgonia.org/leanattention/examples/opt -prompt "Once upon a time"
//
// The text goes to standard output as it comes, everything else to standard
// error. Several prompts are one batch and are continued together; their texts
// come one after the other. Without -model it is a small model that is part of
// the program; -model takes a folder of Hugging Face's with any OPT.
//
// Exit status: 0; 1 if something could not be read, computed or written; 2 for
// wrong flags; 130 after an interrupt, when what was decoded has been written.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
)

const (
	exitError       = 1
	exitUsage       = 2
	exitInterrupted = 130
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	// The first interrupt ends the text, a second one the process.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run is the command; it returns the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	o, err := parse(args, stderr)
	if err == nil {
		err = generate(ctx, o, stdout, stderr)
	}
	var wrong usageError
	switch {
	case err == nil, errors.Is(err, errHelp):
		return 0
	case errors.Is(err, context.Canceled):
		return exitInterrupted
	case errors.As(err, &wrong):
		fmt.Fprintf(stderr, "opt: %v; opt -h lists the flags\n", err)
		return exitUsage
	}
	fmt.Fprintf(stderr, "opt: %v\n", err)
	return exitError
}

// Command leanlm runs language models from their files.
//
//	leanlm generate -m SmolLM2-135M-Instruct -p "Once upon a time"
//	leanlm chat -m SmolLM2-135M-Instruct.Q4_1.gguf
//	leanlm serve -m SmolLM2-135M-Instruct
//	leanlm perplexity -m SmolLM2-135M-Instruct -f book.txt
//	leanlm tokenize -m SmolLM2-135M-Instruct -p "Once upon a time"
//
// -m is a GGUF file or a Hugging Face folder. Without -m the command runs a small model that is part of the program. Each command lists its
// flags with -h.
//
// Where llama.cpp's programs have a flag, the flag has the same name and meaning here: -special shows special tokens, -prompt-cache keeps
// keys and values, -c is the context. perplexity -half -c 512 computes the value of llama.cpp's perplexity. In a chat, /help lists the
// commands; /tool gives the model the result of a tool.
//
// Results go to standard output, and everything else goes to standard error.
//
// Products with weights of 16 bits are computed in mixed precision, unless -exact is given.
//
// Exit status: 0; 1 if something could not be read, computed or written; 2 for wrong flags; 130 after an interrupt, when what was
// computed has been written.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	exitError       = 1
	exitUsage       = 2
	exitInterrupted = 130
)

// command is a command of leanlm.
type command struct {
	name, what string
	run        func(ctx context.Context, args []string, std streams) error
	interrupts bool // run handles interrupts itself
}

// streams are the standard streams.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

var commands = []command{
	{name: "generate", what: "continue texts", run: generate},
	{name: "chat", what: "have a conversation", run: talk, interrupts: true},
	{name: "serve", what: "answer OpenAI's HTTP interface", run: serveModel, interrupts: true},
	{name: "perplexity", what: "tell how well a model predicts a text", run: perplexity},
	{name: "tokenize", what: "list the tokens of a text", run: tokenize},
}

// usageError is a wrong flag, or a wrong value of a flag.
type usageError struct{ text string }

func (e usageError) Error() string { return e.text }

func usagef(format string, args ...any) error { return usageError{fmt.Sprintf(format, args...)} }

func main() {
	ctx := context.Background()
	if !slices.ContainsFunc(commands, func(c command) bool { return c.interrupts && len(os.Args) > 1 && os.Args[1] == c.name }) {
		var stop func()
		ctx, stop = signal.NotifyContext(ctx, os.Interrupt)
		// The first interrupt ends the texts, a second one the process.
		context.AfterFunc(ctx, stop)
	}
	os.Exit(run(ctx, os.Args[1:], streams{os.Stdin, os.Stdout, os.Stderr}))
}

// run runs the command and returns the exit status.
func run(ctx context.Context, args []string, std streams) int {
	err := do(ctx, args, std)
	var wrong usageError
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case errors.As(err, &wrong):
		fmt.Fprintf(std.err, "leanlm: %s\n", printable(err.Error()))
		return exitUsage
	case errors.Is(err, context.Canceled):
		return exitInterrupted
	}
	fmt.Fprintf(std.err, "leanlm: %s\n", printable(err.Error()))
	return exitError
}

func do(ctx context.Context, args []string, std streams) error {
	var names []string
	for _, c := range commands {
		if len(args) > 0 && args[0] == c.name {
			if !c.interrupts {
				std.in = interruptible{ctx, std.in}
			}
			return c.run(ctx, args[1:], std)
		}
		names = append(names, c.name)
	}
	if len(args) > 0 && (args[0] == "help" || strings.TrimLeft(args[0], "-") == "h" || strings.TrimLeft(args[0], "-") == "help") {
		fmt.Fprint(std.out, "Usage: leanlm COMMAND [flags]\n\n")
		for _, c := range commands {
			fmt.Fprintf(std.out, "  %-12s %s\n", c.name, c.what)
		}
		fmt.Fprint(std.out, "\nleanlm COMMAND -h lists the flags of a command.\n")
		return flag.ErrHelp
	}
	if len(args) == 0 {
		return usagef("no command: leanlm needs one of %s", strings.Join(names, ", "))
	}
	best := ""
	for _, name := range names {
		if distance(args[0], name) <= max(1, len(name)/3) || strings.HasPrefix(name, args[0]) {
			best = ": did you mean " + name + "?"
		}
	}
	if best == "" {
		best = "; the commands are " + strings.Join(names, ", ")
	}
	return usagef("no command %q%s", args[0], best)
}

// printable escapes characters that control a terminal, or are invisible on it: an error may contain text of a file.
func printable(message string) string {
	var b strings.Builder
	for len(message) > 0 {
		r, size := utf8.DecodeRuneInString(message)
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, message[0])
		case r == '\n' || r == '\t' || strconv.IsGraphic(r):
			b.WriteString(message[:size])
		default:
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		}
		message = message[size:]
	}
	return b.String()
}

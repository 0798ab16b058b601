/* What the e2e tests run in OSv guests: one behaviour for each first argument. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

static int show(const char *path)
{
	FILE *file = fopen(path, "r");
	int c;

	if (!file) {
		perror(path);
		return 1;
	}
	while ((c = fgetc(file)) != EOF)
		putchar(c);
	fclose(file);
	return 0;
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	int number = argc > 2 ? atoi(argv[2]) : 0;

	if (!strcmp(what, "ret")) {
		printf("returns %d\n", number);
		return number;
	}
	if (!strcmp(what, "exit")) {
		printf("exits %d\n", number);
		exit(number);
	}
	if (!strcmp(what, "abort") || !strcmp(what, "segv")) {
		printf("will %s\n", what);
		fflush(stdout);
		if (what[0] == 'a')
			abort();
		*(volatile int *)8 = 1;
	}
	if (!strcmp(what, "loop") || !strcmp(what, "sleep")) {
		puts(what[0] == 'l' ? "looping" : "sleeping");
		fflush(stdout);
		while (what[0] == 'l')
			continue;
		sleep(number);
	}
	if (!strcmp(what, "env"))
		for (char **each = environ; *each; each++)
			puts(*each);
	if (!strcmp(what, "args"))
		for (int i = 2; i < argc; i++)
			printf("[%s]\n", argv[i]);
	if (!strcmp(what, "cat"))
		return show(argv[2]);
	return 0;
}
